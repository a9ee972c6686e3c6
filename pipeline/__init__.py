"""When each piece of work runs: StepPlan, schedules, verifier, simulator, engine."""
