"""Suite `generate`: prefill and decode throughput of the engine."""
