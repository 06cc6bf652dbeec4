"""Schemas that change: code compared with storages, and the job that migrates."""
