"""A process among ranks: communicators, handles, the communication thread, what is recorded of a call."""
