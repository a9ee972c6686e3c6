"""Balance as OrchMLLM has it (Zheng et al., 2025): the LLM's phase by itself."""

from omni.policies import BalancePolicy, Bins, SampleCosts, ease, longest_first, steady


def assign_orchmllm(samples: SampleCosts, bins: Bins) -> list[int]:
    """Post-balancing by phase (its variant without padding): the LLM's phase by its own cost, quadratic term
    and all, longest processing time first. Then a few changes where a phase is worse than in turn (`ease`),
    which the source has not.

    Encoders' phases are balanced apart, here as there: over all tp groups of a domain, whichever replica a
    sample is on. There a phase is rearranged over the whole world; here items stay in the domain of their
    sample, so domains take the encoder work as it comes. The LLM's largest sum is at most 4/3 - 1/(3 count)
    of the best possible. O(n log count).
    """
    llm_ns = samples.ns[:, 0].tolist()
    chosen, _ = longest_first(llm_ns, bins.count)
    return ease(samples, bins, chosen, steady(llm_ns, chosen, bins))


ORCHMLLM = BalancePolicy("orchmllm", assign_orchmllm)
