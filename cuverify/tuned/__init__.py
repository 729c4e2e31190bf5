"""Tables that `cuverify tune` writes and `cuverify.tuning` reads."""
