"""`onto explore`: a read-only web page of an ontology."""
