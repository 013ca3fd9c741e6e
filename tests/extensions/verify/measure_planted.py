"""Count the kinds of planted faults that `qat verify-export` names, and false ones in whole files.

PYTHONPATH=tests:speedrun python tests/extensions/verify/measure_planted.py --figures F.jsonl
"""

import tempfile
from pathlib import Path

from cyclopts import App
from figures import record
from verify_case import MORE, TWELVE, copy_gguf, export, save_student

from qat.extensions.verify.config import VerifyConfig
from qat.extensions.verify.facts import Finding
from qat.extensions.verify.run import verify

FORMS = ("packed", "dense", "gguf", "mlx", "compressed-tensors")
app = App(help=__doc__)


@app.default
def measure(*, figures: Path) -> None:
    """Plant each fault alone, read each export of the same student, and append to FIGURES."""
    with tempfile.TemporaryDirectory() as folder:
        student = save_student(Path(folder, "student"))
        files = {form: export(student, form, Path(folder, form)) for form in FORMS}
        for name, faults in (("planted_faults_found", TWELVE), ("more_faults_found", MORE)):
            named = 0
            for kind, (change, place) in faults.items():
                file = copy_gguf(files["gguf"], Path(folder, f"{kind}.gguf"), change)
                named += any(
                    f.kind == kind and f.place.startswith(place) for f in found(student, file)
                )
            record(figures, name, named, "kinds", f">= {len(faults)}", runs=len(faults))
        false = sum(len(found(student, file)) for file in files.values())
        record(figures, "false_faults", false, "findings", "0", runs=len(files))


def found(student: Path, file: Path) -> list[Finding]:
    """Return what the verb finds."""
    return verify(str(student), str(file), VerifyConfig()).findings


if __name__ == "__main__":
    app()
