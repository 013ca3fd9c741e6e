"""What pyproject.toml cannot say: a wheel holds the embedded teacher, which `qat demo` needs."""

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

TEACHER = "tiny-qwen3"


class BuildWithTeacher(build_py):
    """Copies `checkpoints/tiny-qwen3` of the clone into the package."""

    def run(self) -> None:
        """Copy the modules and their data, then the teacher."""
        super().run()
        if not self.editable_mode:  # it is read where it is
            place = f"{self.build_lib}/qat/data/{TEACHER}"
            shutil.copytree(f"checkpoints/{TEACHER}", place, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithTeacher})
