"""A slow, obvious caching allocator that checks its own books after every event: the oracle of the lean replay."""

from dataclasses import dataclass, field

MIB = 1 << 20


class Full(Exception):
    pass


@dataclass
class Block:
    address: int
    size: int
    is_free: bool = True


@dataclass
class Segment:
    address: int
    size: int
    is_small: bool
    blocks: list[Block] = field(default_factory=list)


class ReferenceAllocator:
    def __init__(self, capacity: int | None = None, max_split: int | None = None) -> None:
        self.capacity, self.max_split = capacity, max_split
        self.segments: list[Segment] = []
        self.live: dict[int, tuple[Segment, Block]] = {}
        self.made = 0

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def allocated(self) -> int:
        return sum(block.size for _, block in self.live.values())

    def check(self) -> None:
        free = sum(b.size for s in self.segments for b in s.blocks if b.is_free)
        assert self.reserved == self.allocated + free
        for segment in self.segments:
            address = segment.address
            for block, after in zip(segment.blocks, [*segment.blocks[1:], None], strict=True):
                assert block.address == address
                assert not (after and block.is_free and after.is_free), "free neighbours were not merged"
                address += block.size
            assert address == segment.address + segment.size

    def fits(self, block: Block, size: int) -> bool:
        if block.size < size:
            return False
        if self.max_split is not None:
            if size < self.max_split <= block.size:
                return False
            if size >= self.max_split and block.size >= size + 20 * MIB:
                return False
        return True

    def malloc(self, slot: int, size: int) -> None:
        is_small = size <= MIB
        choices = [
            (b.size, b.address, s, b)
            for s in self.segments
            if s.is_small == is_small
            for b in s.blocks
            if b.is_free and b.size >= size
        ]
        segment = block = None
        if choices:
            _, _, segment, block = min(choices, key=lambda choice: choice[:2])
            if not self.fits(block, size):
                segment = block = None
        if block is None:
            wanted = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if self.capacity is not None and self.reserved + wanted > self.capacity:
                self.empty()
                if self.reserved + wanted > self.capacity:
                    raise Full
            self.made += 1
            segment = Segment(-self.made << 60, wanted, is_small)  # each new segment lies below the older ones
            block = Block(segment.address, wanted)
            segment.blocks.append(block)
            self.segments.append(segment)
        assert segment is not None
        rest = block.size - size
        may_split = self.max_split is None or size < self.max_split
        if (is_small and rest >= 512) or (not is_small and rest > MIB and may_split) or (is_small and rest > MIB):
            index = segment.blocks.index(block)
            segment.blocks.insert(index + 1, Block(block.address + size, rest))
            block.size = size
        block.is_free = False
        self.live[slot] = (segment, block)

    def free(self, slot: int) -> None:
        segment, block = self.live.pop(slot)
        block.is_free = True
        merged: list[Block] = []
        for b in segment.blocks:
            if merged and merged[-1].is_free and b.is_free:
                merged[-1].size += b.size
            else:
                merged.append(b)
        segment.blocks = merged

    def empty(self) -> None:
        self.segments = [s for s in self.segments if not (len(s.blocks) == 1 and s.blocks[0].is_free)]
