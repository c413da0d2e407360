"""Memory that ranks share; GPUs, streams and events."""
