"""Parts that every folder uses: errors, files, progress, stopping."""
