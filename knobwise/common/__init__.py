"""What every folder uses: errors, files, progress, stopping."""
