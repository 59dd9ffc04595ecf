"""The only torch of the engine: a StepPlan becomes tokens.

build      the one place where the parts meet: folder → checkpoint → weights → LoadedModel
runner     forward, sample, collect; forward_plan is built once a step, layers only read it
llama      the model on one page; rotary, linear
arena      the bytes behind pages and slots; slot_writer fills them, site_table says what lies where
lora       an adapter at each fused linear: the kernels, or (lora_views) cached views on a CPU
sampler    logits → tokens: logit_rules, seats, randomness, logprobs
"""
