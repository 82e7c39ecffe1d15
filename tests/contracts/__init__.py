"""Contract simulators: doubles of a vendor's Python packages with exactly the documented surface, over the simulated
device of tests/sim. What a vendor's documents do not allow raises ContractViolation, which names the fact and where it
is written. They live in tests: no backend imports them."""

from __future__ import annotations

from .facts import Fact, facts

__all__ = ["ContractViolation", "Fact", "facts", "violate"]


class ContractViolation(BaseException):
    """A call that the vendor does not document, or documents as an error. It derives from BaseException so that a
    broad `except Exception` in the code under test cannot hide it."""

    def __init__(self, fact: Fact, seen: str) -> None:
        self.fact = fact
        super().__init__(f"{seen}; {fact.vendor} {fact.id}: {fact.text} [{fact.source}; {fact.certainty}]")


def violate(id: str, seen: str) -> ContractViolation:
    """The violation of the fact `id`, by what was `seen`."""
    return ContractViolation(facts()[id], seen)
