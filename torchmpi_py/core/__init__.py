"""The core of a rank: communicators, handles, the communication thread, and the journal of operations."""
