"""Reproducible reductions: the same bits for every size, algorithm and placement of ranks.

The canonical order is that of ranks: contributions 0, 1, ... p-1 are combined in one accumulation, without
rounding in between. All algorithms that are proved to do this give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.plans import ALGORITHMS, CONTRACTS, make

if TYPE_CHECKING:
    from unisono.plans.proof import Proof

_UNORDERED = (
    "does not combine contributions in the order of ranks, which reproducible=True asks for, and functions "
    "that do not commute"
)


class ReproducibleAlgorithms:
    """Which algorithms combine in the canonical order in a group of `size` ranks, and which once."""

    def __init__(self, size: int, hosts: tuple[int, ...]) -> None:
        self._size = size
        self._hosts = hosts
        self._proofs: dict[tuple[str, str, int], Proof] = {}

    def algorithm(
        self,
        collective: str,
        wanted: str,
        root: int,
        asked: bool,
        in_order: bool = True,
        once: bool = False,
    ) -> str:
        """`wanted` if it is canonical; otherwise the first that is, unless the caller has named `wanted`.

        Args:
            in_order: it has to be canonical.  once: it has to compute every result on one rank only.
        Raises:
            ValueError: the caller has named an algorithm that does not fit, or none does.
        """
        contract = CONTRACTS[collective]
        combines = contract.reduces and contract.counts  # a barrier combines no values

        def fits(name: str) -> bool:
            proof = self._proof(collective, name, root)
            return (proof.canonical or not in_order) and (proof.once or not once)

        if not combines or fits(wanted):
            return wanted
        fit = [name for name in ALGORITHMS[collective] if fits(name)]
        if asked or not fit:
            names = ", ".join(fit) or "none has"
            if once and self._proof(collective, wanted, root).canonical:
                lacks = "computes a result on several ranks, whose bits may differ with a function"
            else:
                lacks = _UNORDERED
            raise ValueError(f"{collective}: algorithm {wanted!r} {lacks}; these do not: {names}")
        return fit[0]

    def check_custom(self, kind: str, name: str, wrong: bool) -> None:
        """Raises ValueError: the order of the caller's own algorithm is wrong."""
        if wrong:
            raise ValueError(f"{kind}: algorithm {name!r} {_UNORDERED}")

    def _proof(self, collective: str, algorithm: str, root: int) -> Proof:
        key = (collective, algorithm, root)
        found = self._proofs.get(key)
        if found is None:
            from unisono.plans.proof import prove

            found = self._proofs[key] = prove(make(collective, algorithm, self._size, root, self._hosts))
        return found
