"""Functions that repeat a problem of a suite, and those that only sound like one."""

from qat.extensions.suite.overlap import Overlap

COUNT = """def count_up(numbers):
    \"\"\"Return how many numbers are larger than all of the numbers before them.
    >>> count_up([1, 2, 3, 4, 5, 6, 7, 8, 9])
    9
    \"\"\"
"""


def test_eight_words_or_a_name_with_half_of_the_words_are_close() -> None:
    overlap = Overlap([("count_up", COUNT)])
    repeated = "Tell how many NUMBERS are larger than all of the numbers: in a list."
    assert overlap.has("other", repeated)
    assert not overlap.has("other", repeated.replace("larger", "longer"))
    assert overlap.has("count_up", "Return how many numbers are larger than the last one.")
    assert not overlap.has("count_up", "Count from one to a limit and yield every step on the way.")
    assert not overlap.has("other", "other([1, 2, 3, 4, 5, 6, 7, 8, 9])")
    assert not Overlap([]).has("count_up", COUNT)
