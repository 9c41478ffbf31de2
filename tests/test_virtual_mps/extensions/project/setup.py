# A Mac extension's setup.py: it knows nothing of this package.
import subprocess
import sys

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

subprocess.run(["xcrun", "-sdk", "macosx", "metal", "-c", "square.metal", "-o", "square.air"], check=True)
subprocess.run(["xcrun", "-sdk", "macosx", "metallib", "square.air", "-o", "square.metallib"], check=True)

setup(
    name="square_project",
    ext_modules=[
        CppExtension(
            "square_project",
            ["square.mm", "binding.cpp"],
            extra_compile_args={"cxx": ["-O1", "-fobjc-arc", "-mmacosx-version-min=14.0"]},
            extra_link_args=["-framework", "Metal", "-framework", "Foundation", "-Wl,-rpath,@loader_path"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    script_args=sys.argv[1:],
)
