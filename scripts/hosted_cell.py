# Hosted services (Colab, Kaggle): fetch and install the course. In a clone: nothing.
from importlib.util import find_spec

COURSE = ""  # the repository's address, or the path of an uploaded clone or zip file
if find_spec("rlhelpers") is None:
    import os
    import runpy
    import shutil
    import subprocess
    from pathlib import Path

    here, course = Path.cwd(), os.environ.get("RL_COURSE") or COURSE
    found = [p for p in (*here.parents, Path(course)) if (p / "rlhelpers").is_dir()]
    if not found and not course:
        raise RuntimeError("set COURSE in this cell: the course's package is not here")
    if not found and not Path("rl-course").exists():
        if course.endswith(".zip"):
            shutil.unpack_archive(course, "rl-course")
        else:
            command = ["git", "clone", "--quiet", "--depth", "1", course, "rl-course"]
            subprocess.run(command, check=True)
    found = found or [p.parent for p in Path("rl-course").rglob("rlhelpers")]
    runpy.run_path(str(found[0] / "scripts" / "hosted.py"))["set_up"](found[0])
