"""The package is described in setup.cfg; this keeps the links in knobwise/ as links in an sdist."""

from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist


class SdistWithLinks(sdist):
    """setuptools copies what a link leads to, so that the archive would hold every module twice,
    and the tree would not be that of a clone."""

    def make_release_tree(self, base_dir, files):
        links = [path for path in Path("knobwise").iterdir() if path.is_symlink()]
        reached = [file for file in files if not set(links).isdisjoint(Path(file).parents)]
        super().make_release_tree(base_dir, sorted(set(files) - set(reached)))
        for link in links:
            (Path(base_dir) / link).symlink_to(link.readlink())


setup(cmdclass={"sdist": SdistWithLinks})
