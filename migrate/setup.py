"""Puts flatout_migrate.pth beside the package: it adds names/ to the end of sys.path, after all real packages."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPath(build_py):
    """Copies the .pth file into the wheel."""

    def run(self):
        super().run()
        self.copy_file("flatout_migrate.pth", str(Path(self.build_lib) / "flatout_migrate.pth"))


setup(cmdclass={"build_py": BuildWithPath})
