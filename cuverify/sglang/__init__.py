"""SGLang's contract with an attention backend, played without SGLang.

`contract` has the objects that a backend meets, under SGLang's own names; `inputs` the static
buffers of its graph runner and what padding leaves in them; `schedule` the batches of a run; `play`
captures and replays a backend by that schedule, with CUDA graphs or with their likeness on the
host; `judge` says by which rule it failed; `backend` and `gqa_backend` are our own verify
attentions as such backends.
"""
