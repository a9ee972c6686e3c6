"""Literal tokens among the rows of items: loaders write the id of rows there, and plans know which it is."""

from collections.abc import Mapping
from itertools import accumulate

from dataloader.loader import TextArrays
from pipeline.domain_plan import DomainPlan


def with_literals(domain: DomainPlan, texts: Mapping[int, TextArrays]) -> dict[int, TextArrays]:
    """Texts of a domain's samples, by number, with the literal tokens of their items among the ids. Labels
    stay: what stands among rows carries no loss.
    """
    found = dict(texts)
    starts: dict[int, int] = {}
    for batch in domain.microbatches:
        starts |= zip(batch.samples, accumulate(batch.layout.lengths, initial=0), strict=False)
    for item in domain.items:
        if item.runs and item.sample in found:
            ids, labels, mask = found[item.sample]
            ids = ids.copy()
            for place, token in item.literals():
                ids[place - starts[item.sample]] = token
            found[item.sample] = ids, labels, mask
    return found
