"""Merges: the changes of a branch become one commit of its parent, or the other way round."""

from storage_engine.repository.object.merge.report import Conflict, MergeReport, TypeMerge
from storage_engine.repository.object.merge.rows import Policy
from storage_engine.repository.object.merge.run import MergeTerms, merge, update

__all__ = ["Conflict", "MergeReport", "MergeTerms", "Policy", "TypeMerge", "merge", "update"]
