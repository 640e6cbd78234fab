"""Where a sequence's KV lives: grow, park, evict or resume, decided at page boundaries.

The boundary decision of BatchGen (arXiv 2606.21712) over a frozen snapshot: sequences that need a
page get one; where the pool cannot give it, others make room, first those that lose least; what
was parked comes back when there is room again.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SequenceView:
    """What the decision knows of a sequence.

    Attributes:
      index: order of arrival; breaks ties.
      priority: lower ones make room first.
      decoded: tokens decoded so far.
      needs: pages without which it cannot go on; of a parked one, the pages to come back.
      frees: pages that become free if it lets go of all it holds.
      host_pages: pages of host memory that its KV would take.
      parkable: whether its KV is complete enough to be kept on the host.
    """

    index: int
    priority: int
    decoded: int
    needs: int
    frees: int
    host_pages: int
    parkable: bool = True


@dataclasses.dataclass(frozen=True)
class ResidencyView:
    """A snapshot.

    Attributes:
      running: sequences that hold pages, decoding or in prefill.
      parked: sequences whose KV is on the host.
      free: pages that can be had.
      host_free: pages of host memory that can be had.
      slots_free: how many more sequences may run.
    """

    running: tuple[SequenceView, ...]
    parked: tuple[SequenceView, ...]
    free: int
    host_free: int
    slots_free: int


@dataclasses.dataclass(frozen=True)
class ResidencyDecision:
    """Sequences by index. Those parked and evicted let go before ``grow`` is served.

    Attributes:
      grow: get the pages they need.
      park: KV to the host.
      evict: KV dropped, tokens kept.
      resume: KV back from the host.
      exhausted: cannot go on even alone; the pool is too small for them.

    Where sequences let go and nothing grows, the decision must be asked again.
    """

    grow: tuple[int, ...] = ()
    park: tuple[int, ...] = ()
    evict: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()
    exhausted: tuple[int, ...] = ()


def decide(view: ResidencyView) -> ResidencyDecision:
    """The boundary decision.

    Victims are those of the lowest priority, of them the least decoded, of them the latest; so
    what is nearly done gets done. One sequence always stays, hence something always moves on. Those
    parked come back most decoded first, when a page is left for each that runs, or when nothing
    runs; none comes back that would have to make room again at once.
    """
    staying = sorted(view.running, key=_loss)
    needed = sum(s.needs for s in staying)
    free, host = view.free, view.host_free
    park: list[int] = []
    evict: list[int] = []
    while needed > free and len(staying) > 1:
        victim = staying.pop(0)
        needed -= victim.needs
        free += victim.frees
        if victim.parkable and victim.host_pages <= host:
            host -= victim.host_pages
            park.append(victim.index)
        else:
            evict.append(victim.index)
    if needed > free:
        # pages that victims shared with each other count for none of them: only a decision over
        # what is left can tell whether the last one fits
        alone = () if park or evict else (staying[0].index,)
        return ResidencyDecision(park=tuple(park), evict=tuple(evict), exhausted=alone)
    grow = tuple(s.index for s in staying if s.needs)
    resume: list[int] = []
    exhausted: list[int] = []
    if not park and not evict:
        free -= needed
        running, slots = len(staying), view.slots_free
        for parked in sorted(view.parked, key=_loss, reverse=True):
            if slots < 1:
                break
            reserve = running + 1 if running else 0
            if parked.needs + reserve > free:
                if not running:
                    exhausted.append(parked.index)
                break
            free -= parked.needs
            running, slots = running + 1, slots - 1
            resume.append(parked.index)
    return ResidencyDecision(
        grow=grow,
        park=tuple(park),
        evict=tuple(evict),
        resume=tuple(resume),
        exhausted=tuple(exhausted),
    )


def loss(priority: int, decoded: int, index: int) -> tuple[int, int, int]:
    """What letting a sequence go loses, by priority, tokens decoded and order of arrival; the
    least goes first.
    """
    return priority, decoded, -index


def _loss(sequence: SequenceView) -> tuple[int, int, int]:
    return loss(sequence.priority, sequence.decoded, sequence.index)
