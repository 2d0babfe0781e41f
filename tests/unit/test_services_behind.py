import threading

import pytest

from infra.services.behind import Behind


def test_calls_are_made_in_order_and_not_waited_for_but_at_the_end():
    go, made = threading.Event(), []
    with Behind() as behind:
        behind(go.wait)
        for n in range(3):
            behind(made.append, n)
        assert made == []
        go.set()
    assert made == [0, 1, 2]


def test_what_a_call_raises_is_raised_by_the_next_or_by_the_end():
    go, failed, made = threading.Event(), threading.Event(), []

    def fail() -> None:
        go.wait()
        failed.set()
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"), Behind() as behind:
        behind(fail)
        behind(made.append, 1)
        go.set()
    assert made == [1]
    with pytest.raises(OSError, match="disk"), Behind() as behind:
        behind(fail)
        behind(failed.wait)
        behind._asked[1].result()
        behind(made.append, 2)
    assert made == [1]
    with pytest.raises(ValueError, match="first"), Behind() as behind:
        behind(fail)
        raise ValueError("first")
