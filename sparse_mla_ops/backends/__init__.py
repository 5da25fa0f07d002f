"""One module per backend; see `sparse_mla_ops.registry` for what a backend is. Nothing is imported from here."""
