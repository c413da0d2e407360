"""Memory that ranks share, and devices with their streams and events."""
