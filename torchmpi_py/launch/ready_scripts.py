"""Scripts for batch systems, from the folder templates/: ``torchmpirun --template`` prints them for users to adapt."""

from pathlib import Path

FOLDER = Path(__file__).with_name("templates")
PARTS = {"slurm": "slurm.sbatch", "pbs": "pbs.sh", "kubernetes": "mpijob.yaml"}
DOCKERFILE_PREFIX = "#| "  # precedes each line of the Dockerfile in the script for Kubernetes, as a comment


def text(name: str) -> str:
    """Return the script for a batch system. The script for Kubernetes begins with the Dockerfile of its image."""
    script = (FOLDER / PARTS[name]).read_text()
    if name != "kubernetes":
        return script
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    return "".join(f"{DOCKERFILE_PREFIX}{line}".rstrip() + "\n" for line in lines) + script
