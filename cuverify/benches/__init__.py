"""What `cuverify bench` runs: a module ``<stem>.py`` here with ``run(device) -> list[dict]``.

``device`` is ``"cuda"`` or ``"cpu"``. A benchmark that has nothing to measure on a device returns
an empty list there. The dictionaries are made by `cuverify.bench.gated`, which times nothing
before the result is known to be right; their keys are those of `cuverify.bench.Record`. Further
keywords of ``run``, with defaults, are options that the command hands on.
"""
