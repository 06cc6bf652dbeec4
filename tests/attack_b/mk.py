import sys; sys.path.insert(0,'/tmp/ab')
from models import *
from storage_engine import Session, initialize_storage
import shutil,os
shutil.rmtree('/tmp/ab/st',ignore_errors=True)
initialize_storage('/tmp/ab/st')
if os.path.exists('/tmp/ab/s.db'): os.remove('/tmp/ab/s.db')
initialize_storage('sqlite:////tmp/ab/s.db')
for u in ('/tmp/ab/st','sqlite:////tmp/ab/s.db'):
    with Session(u) as s:
        for i in range(5): s.ensure(Customer(id=f"c{i}",name=f"N{i}",age=i))
        for i in range(5): s.ensure(Knows(left_key=f"c{i}",right_key=f"c{(i+1)%5}",since=i))
        print(s.commit())
