import sys; sys.path.insert(0,"/tmp/ab"); import resource; resource.setrlimit(resource.RLIMIT_AS,(4<<30,4<<30))
from storage_engine import Session
def show(s,q):
    try:
        rows=s.sql(q); r=rows.to_arrow()
        print("ok",r.num_rows)
    except BaseException as e: print(type(e).__module__,type(e).__name__,str(e)[:150].replace("\n"," | "))
with Session(sys.argv[1]) as s:
    for q in ["SELECT CASE WHEN range>2500000 THEN list_aggr([range],'reservoir_quantile',0.5,2000000000) END x FROM range(3000000)",
      "SELECT CASE WHEN range>2500000 THEN (1/0)::VARCHAR||error('late') END x FROM range(3000000)",
      "SELECT CASE WHEN range>2500000 THEN length(repeat('x',8000000000)) END x FROM range(3000000)",
      "SELECT CASE WHEN range>2500000 THEN len(list_resize([range],2000000000)) END x FROM range(3000000)",
      "SELECT CASE WHEN range>2500000 THEN printf('%1900000000d',range) END x FROM range(3000000)"]:
        print(q[:90]); show(s,q); show(s,"SELECT count(*) FROM Customer")
