import sys, uuid, random, json
sys.path.insert(0,"/tmp"); sys.argv=["x","0","0"]
import sim
from sim import *
import logging; logging.disable(logging.CRITICAL)
engine = os.environ.get("ENG","v2")
s=Run(int(os.environ.get("SEED","5")),engine)
for a in (["write"]*6+["unit"]*6+["compact"]+["write"]*3+["tag","bulk","unit","write","tag","sleep","collect","write","unit","compact","write","tag","unit","unit"]):
    getattr(s,a)()
for w in s.writers.values(): w.repo.flush()
s.check(); print("base findings", s.deep())
from tests.commitlog.support import World
base=dict(s.w.backend.objects())
print(len(base), "objects", len(s.commits),"commits", s.marks, s.tags)
def world(objs):
    b=memory_backend(f"v-{uuid.uuid4().hex}"); b.clock=s.w.backend.clock
    for k,v in objs.items(): b.write(k,v)
    return World(b,engine)
def ops(objs):
    """problems seen by use"""
    w=world(objs); out=[]
    def t(name,f):
        try:
            r=f()
            if r is not None: out.append(f"{name}: WRONG {str(r)[:120]}")
        except OntologiaError as e: out.append(f"{name}: {type(e).__name__} {str(e)[:80]}")
        except Exception as e: out.append(f"{name}: RAW {type(e).__name__} {str(e)[:80]}")
    def rd():
        r=w.open("r")
        for i,spec in enumerate(TYPES):
            got={x["entity_key"]:x["age"] for x in r.rows(spec)}
            if got!=s.state_of(len(s.commits),i): return (i,got,s.state_of(len(s.commits),i))
    def hist():
        r=w.open("r")
        for i,spec in enumerate(TYPES):
            h=sorted((x["commit_id"],x["entity_key"],x["age"]) for x in r.rows(spec,HISTORY))
            if h!=sorted((n+1,k,v) for n,c in enumerate(s.commits) for k,v in c.get(i,{}).items()): return i,h
    def asof():
        r=w.open("r")
        for c in range(1,len(s.commits)+1):
            for i,spec in enumerate(TYPES):
                got={x["entity_key"]:x["age"] for x in r.rows(spec,ReadWindow(as_of=c))}
                if got!=s.state_of(c,i): return c,i,got
    def commits():
        r=w.open("r").repo
        if [c.id for c in r.list_commits(1000,None)]!=list(range(len(s.commits),0,-1)): return "list"
    def applied():
        for a,(v,c) in s.marks.items():
            u=w.open("r").repo.applied(Idempotency(a,v))
            if u is None: return a,v,c
    def tags():
        for n,c in s.tags.items():
            if w.open("r").repo.resolve_tag(n).commit_id!=c: return n
    def gc(): plan_gc(w.open("g").repo, grace=timedelta(0))
    def commit():
        x=w.open("w"); x.commit(rows_of(TYPES[0],{"entity_key":"new","id":"new","age":77}))
        x.repo.flush()
        got={y["entity_key"]:y["age"] for y in w.open("r").rows(TYPES[0])}
        if got!={**s.state_of(len(s.commits),0),"new":77}: return got
    for n,f in dict(rd=rd,hist=hist,asof=asof,commits=commits,applied=applied,tags=tags,gc=gc,commit=commit).items(): t(n,f)
    return out
def verify(objs):
    w=world(objs)
    try:
        r=verify_storage(w.open("v").repo, deep=True)
        return [f"{f.area}/{f.reason}" for f in r.findings]
    except OntologiaError as e: return ["typed "+str(e)[:80]]
    except Exception as e: return [f"RAW {type(e).__name__} {e}"]
print("base ops", ops(base))
def kinds(k): 
    import re
    return re.sub(r"[0-9a-f]{8,}","#",re.sub(r"\d+-","N-",k))
def report(what,k,objs):
    v=verify(objs); o=ops(objs)
    flag=""
    o=[x for x in o if not x.startswith("tags: Unknown")]
    if not v and o: flag="**CLEAN BUT BROKEN**"
    if any("RAW" in x for x in v+o): flag+="**RAW**"
    if any("WRONG" in x for x in o): flag+="**WRONG**"
    if flag: print(flag,what,k,"verify",v[:3],"ops",o[:4],flush=True)
done={}
mode=os.environ.get("MODE","rm")
for k in sorted(base):
    kk=kinds(k); done[kk]=done.get(kk,0)+1
    if done[kk]>int(os.environ.get("PER","4")): continue
    if mode=="rm":
        report("rm",k,{a:b for a,b in base.items() if a!=k})
    elif mode=="swap":
        # replace by another of the same kind
        for k2 in sorted(base):
            if k2!=k and kinds(k2)==kk and base[k2]!=base[k]:
                report("swap "+k2,k,{**base,k:base[k2]}); break
    elif mode=="flip":
        d=bytearray(base[k]); 
        if d:
            d[len(d)//2]^=1; report("flip",k,{**base,k:bytes(d)})
    elif mode=="trunc":
        report("empty",k,{**base,k:b""})
print(done)
