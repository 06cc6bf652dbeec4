"""Assets that read the ontology or write small tables to it."""
