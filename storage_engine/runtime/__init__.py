"""What users work with: `Session` and `Ontology`, and how their intents become commits."""
