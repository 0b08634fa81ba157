"""The served models: which are loaded, who leases them, and the way to their engines and back."""
