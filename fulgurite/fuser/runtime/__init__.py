"""Generated code → something to call: compile, load, launch, memory pool, autotuning."""
