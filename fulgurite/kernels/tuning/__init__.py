"""Launch configurations: one class, one table per device family."""
