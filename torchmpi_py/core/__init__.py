"""A process among ranks: communicators, handles, the communication thread, the journal of operations."""
