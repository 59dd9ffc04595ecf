"""Every name here is a benchmark, `make bench-NAME` or `python -m benchmarks.NAME`: a module, or a
room whose `__main__` is the command. But for two: `shared`, which several benchmarks lean on, and
`results`, the rows by hardware.

    ops            LoRA's kernels: a layer's sites with adapters against the same without
    attention      decode and prefill attention over pages
    elementwise    the kernels between the GEMMs, and sampling
    step           whole steps of the model; step_profile: where a step's time goes
    serve          traces through gRPC, on our own stack or against any server
    deployments    one engine, an engine an adapter, merged checkpoints
    cpu            the demo model on this machine's processor, through the whole stack
    memory         what an adapter takes of the engine's memory
    registry       how long a publish takes, and how soon everybody knows
    fairness       the scheduler against two others, simulated; fairness_live: in a real engine
    waits          waits and pauses of a served load by how turns end, simulated
    plan_cost      what planning a step costs the core; plan_reading: and the runner to read

Rooms do not import each other: what two of them need is in `shared`.
"""
