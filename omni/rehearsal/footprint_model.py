"""What a rank holds and sends in a step by the models of memory and bytes, to be compared with rehearsals."""

from omni.planning.memory import by_kind, model_encoding, model_host, model_peak
from omni.planning.rank_work import rank_work
from omni.planning.run_spec import RunSpec
from omni.rehearsal.footprint import Footprint
from omni.rehearsal.traffic import traffic
from pipeline.plan import StepPlan


def model_footprint(spec: RunSpec, plan: StepPlan, rank: int) -> Footprint:
    """Model what `rank` holds and sends in the plan of its domain."""
    work = rank_work(spec, plan, rank)
    peak, at = model_peak(spec, work)
    return Footprint(
        parameters={
            name: sum(weight.elements for part in parts.values() for weight in part.weights())
            for name, parts in work.components.items()
        },
        peak=by_kind(peak),
        at=at,
        traffic=traffic(spec, work),
        encoding=model_encoding(spec, work),
        host=model_host(work),
    )
