"""Values of a tuple of fields, as batches and episodes have them."""

from typing import Any, SupportsIndex, overload


class TupleRecord(tuple[Any, ...]):
    """A tuple whose items also have the keys that they are stored under: ``pair["0"]`` is ``pair[0]``.

    Iterating and unpacking give the items, ``keys`` and ``items`` are those of a dict: ``dict(pair)`` has both.
    """

    __slots__ = ()

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> Any:
        """Return the item at a place or key; KeyError where there is no such key."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.keys():
            raise KeyError(key)
        return super().__getitem__(int(key))

    def __contains__(self, key: object) -> bool:
        """Tell whether there is an item of this key; of anything else, whether it is an item."""
        return key in self.keys() if isinstance(key, str) else super().__contains__(key)

    def keys(self) -> tuple[str, ...]:
        """Return "0", "1", ..., one key an item."""
        return tuple(map(str, range(len(self))))

    def values(self) -> tuple[Any, ...]:
        """Return the items."""
        return tuple(self)

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Return keys and items, pair by pair."""
        return tuple(zip(self.keys(), self, strict=True))
