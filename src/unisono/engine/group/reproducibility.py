"""Reproducible reductions: the same bits for every size, algorithm and placement of ranks.

The canonical order is that of ranks: contributions 0, 1, ... p-1 are combined in one accumulation, without
rounding in between. All algorithms that are proved to do this give the same bits.
"""

from __future__ import annotations

from unisono.plans import ALGORITHMS, CONTRACTS, make

__all__ = ["ReproducibleAlgorithms"]


class ReproducibleAlgorithms:
    """Which algorithms combine in the canonical order in a group of `size` ranks."""

    def __init__(self, size: int, hosts: tuple[int, ...]) -> None:
        self._size = size
        self._hosts = hosts
        self._canonical: dict[tuple[str, str, int], bool] = {}

    def algorithm(self, collective: str, wanted: str, root: int, asked: bool) -> str:
        """`wanted` if it is canonical; otherwise the first that is, unless the caller has named `wanted`.

        Raises:
            ValueError: the caller has named an algorithm that is not canonical, or none is.
        """
        contract = CONTRACTS[collective]
        combines = contract.reduces and contract.counts  # a barrier combines no values
        if not combines or self._is_canonical(collective, wanted, root):
            return wanted
        fit = [name for name in ALGORITHMS[collective] if self._is_canonical(collective, name, root)]
        if asked or not fit:
            names = ", ".join(fit) or "none has"
            raise ValueError(
                f"{collective}: algorithm {wanted!r} does not combine contributions in the order of ranks, "
                f"which reproducible=True asks for; these do: {names}"
            )
        return fit[0]

    def _is_canonical(self, collective: str, algorithm: str, root: int) -> bool:
        key = (collective, algorithm, root)
        found = self._canonical.get(key)
        if found is None:
            from unisono.plans.proof import prove

            proof = prove(make(collective, algorithm, self._size, root, self._hosts))
            found = self._canonical[key] = proof.canonical
        return found
