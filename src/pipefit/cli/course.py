"""`pipefit course`: the exercises of the course, and the reader's answers."""

from __future__ import annotations

from pipefit.cli.answer import FINDING, Answer, picked
from pipefit.cli.options import Json
from pipefit.errors import PipefitError


def command(chapter: int | None = None, /, *, answer: float | None = None, json: Json = False) -> Answer:
    """Ask the exercise of a chapter of the course, and check an answer.

    Example: pipefit course 3 --answer 45.5

    Without a chapter all exercises are listed. Within 1 % an answer is right; exit code 1: it is not.

    Args:
        chapter: Number of the chapter.
        answer: Your number, in the unit that the question names.
    """
    from pipefit.reproduce.exercises import exercises

    known = exercises()
    if chapter is None:
        if answer is not None:
            raise PipefitError("--answer: expected a chapter too, as in pipefit course 3 --answer 45.5")
        lines = [f"{number}  {each.title}" for number, each in enumerate(known, 1)]
        titles = [each.title for each in known]
        return Answer({"chapters": titles}, "\n".join([*lines, "", "pipefit course 3 asks the exercise of chapter 3"]))
    if not 1 <= chapter <= len(known):
        raise PipefitError(f"chapter: expected 1 to {len(known)}, got {chapter}")
    exercise = known[chapter - 1]
    data = picked(exercise, "title", "question", "unit")
    if answer is None:
        return Answer(data, f"{exercise.question}\n\npipefit course {chapter} --answer NUMBER")
    verdict, ours = exercise.judge(answer)
    data["verdict"] = verdict
    if verdict == "right":
        return Answer(data, f"{verdict}: {ours}")
    return Answer(data, f"{verdict}\nhint: {exercise.hint}", FINDING)
