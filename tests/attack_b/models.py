from storage_engine import Entity, Event, Field, Relation
class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    age: Field[int]
class Knows(Relation[Customer, Customer]):
    since: Field[int]
