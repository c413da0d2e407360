"""Scripts for batch systems: files in templates/, which ``torchmpirun --template`` prints for users to adapt."""

from pathlib import Path

FOLDER = Path(__file__).with_name("templates")
PARTS = {"slurm": "slurm.sbatch", "pbs": "pbs.sh", "kubernetes": "mpijob.yaml"}
DOCKERFILE_PREFIX = "#| "  # the Dockerfile's lines become comments in the script for Kubernetes


def text(name: str) -> str:
    """Return the script for a batch system. For Kubernetes it begins with the Dockerfile of its image."""
    script = (FOLDER / PARTS[name]).read_text()
    if name != "kubernetes":
        return script
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    return "".join(f"{DOCKERFILE_PREFIX}{line}".rstrip() + "\n" for line in lines) + script
