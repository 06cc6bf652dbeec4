"""The event bus: stores of events and claims, and the dispatcher that runs handlers."""
