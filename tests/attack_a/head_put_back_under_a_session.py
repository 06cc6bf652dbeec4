"""Head restored to an older version under a live session."""
import shutil
from storage_engine import Entity, Field, Ontology
from storage_engine.repository import initialize_storage
from storage_engine.config import OntologiaConfig
from pathlib import Path
class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    age: Field[int]
uri="file:///tmp/aa_m2"
shutil.rmtree("/tmp/aa_m2",ignore_errors=True)
initialize_storage(uri, "v2", OntologiaConfig())
onto = Ontology(storage_uri=uri)
s = onto.session()
for i in range(1,4):
    s.ensure(Customer(id="a", age=i)); s.commit()
s.flush()
head=Path("/tmp/aa_m2/meta/head.json"); 
import glob; print(glob.glob("/tmp/aa_m2/**/head*",recursive=True))
head=Path(glob.glob("/tmp/aa_m2/**/head.json",recursive=True)[0])
old=head.read_bytes()
for i in range(4,7):
    s.ensure(Customer(id="a", age=i)); s.ensure(Customer(id="b", age=i)); s.commit()
s.flush()
head.write_bytes(old)   # the operator restores the bucket's older version
print("after restore", [(c.id,c.age) for c in s.query().entities(Customer).collect()])
s.ensure(Customer(id="a", age=6)); s.ensure(Customer(id="b", age=6))
print("commit says", s.commit())
print("live  ", [(c.id,c.age) for c in s.query().entities(Customer).collect()])
with Ontology(storage_uri=uri).session() as t:
    print("fresh ", [(c.id,c.age) for c in t.query().entities(Customer).collect()])
    # another writer continues beyond
    for i in range(10,15):
        t.ensure(Customer(id="c", age=i)); print(t.commit())
s.ensure(Customer(id="a", age=6)); s.ensure(Customer(id="b", age=6))
print("commit says", s.commit())
with Ontology(storage_uri=uri).session() as t:
    print("fresh ", [(c.id,c.age) for c in t.query().entities(Customer).collect()])
