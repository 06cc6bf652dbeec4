import random, sys, traceback, uuid
from datetime import timedelta
from unittest import mock
from storage_engine.commitlog import layout, state, publisher, type_heads
state.PAGE_COMMITS=3; publisher._MARKS_IN_HEAD=2; type_heads.INLINE_TYPES=3; type_heads._FEWEST_BUCKETS=2; type_heads._FULL_BUCKET=2
from storage_engine.model import Entity, Field, spec_of
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.compaction.plan import TierPolicy
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.indices import repair_indices, verify_indices
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.maintenance.restore import restore
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.objectstore.open import memory_backend
from storage_engine.repository import ReadWindow, Idempotency
from storage_engine.testing.faults import FaultKind
from storage_engine.errors import OntologiaError, LockContentionError
from tests.commitlog.support import HISTORY, new_world, World
from tests.engines import rows_of, stream_of
from storage_engine.repository.object.read import latest
import os
if os.environ.get("NORES"): latest._TYPE_ROWS=0
TYPES=[]
for i in range(8):
    cls=type(f"T{i}",(Entity,),{"__annotations__":{"id":Field[str],"age":Field[int]},"id":Field(primary_key=True)})
    TYPES.append(spec_of(cls))
SMALL=TierPolicy(tail=3, cut_off=2)
class Run:
    def __init__(s, seed, engine):
        s.r=random.Random(seed); s.w=new_world(engine); s.engine=engine
        s.commits=[]; s.marks={}; s.tags={}; s.log=[]; s.writers={}
        s.last=[]
    def writer(s):
        name=s.r.choice("AB")
        w=s.writers.get(name)
        if w is None or w.store.crashed:
            w=s.writers[name]=s.w.open(name, merges=SMALL, checkpoint_interval=s.r.choice([2,5,1000]))
        return w
    def state_of(s, upto, t):
        m={}
        for c in s.commits[:upto]:
            m|=c.get(t,{})
        return m
    def step(s):
        a=s.r.choice([s.write]*8+[s.unit]*4+[s.bulk,s.crash,s.crash,s.compact,s.collect,s.collect,s.tag,s.untag,s.restore,s.sleep,s.flush,s.reopen,s.copy,s.rewind,s.repair,s.dropindex])
        s.log.append(a.__name__); a()
    def rows(s):
        out={}
        for t in s.r.sample(range(8), s.r.choice([1,1,2,5])):
            out[t]={k:s.r.randint(1,4) for k in s.r.sample("abc",s.r.randint(1,2))}
        return out
    def inputs(s, rows, f=rows_of):
        if f is rows_of:
            return [rows_of(TYPES[t],*[{"entity_key":k,"id":k,"age":v} for k,v in d.items()]) for t,d in rows.items()]
        return [stream_of(TYPES[t],[{"entity_key":k,"id":k,"age":v} for k,v in d.items()]) for t,d in rows.items()]
    def model(s, rows):
        ch={}
        for t,d in rows.items():
            now=s.state_of(len(s.commits),t)
            c={k:v for k,v in d.items() if now.get(k)!=v}
            if c: ch[t]=c
        return ch
    def write(s, f=rows_of):
        rows=s.rows(); ch=s.model(rows)
        res=s.writer().commit(*s.inputs(rows,f))
        assert (res is not None)==bool(ch),(rows,ch,res)
        if ch: s.commits.append(ch); assert res.commit_id==len(s.commits)
    def bulk(s): s.write(stream_of)
    def unit(s):
        app=s.r.choice("pqrstu"); last=s.marks.get(app)
        ver=s.r.choice([s.r.randint(1,12), "x", "y"])
        rows=s.rows() if s.r.random()<.6 else {}
        covered= last is not None and (ver<=last[0] if isinstance(ver,int) and isinstance(last[0],int) else ver==last[0])
        ch=s.model(rows)
        res=s.writer().commit(*s.inputs(rows), idempotency=Idempotency(app,ver))
        if covered:
            assert (res.commit_id if res else None)==last[1],(app,ver,last,res)
        elif ch:
            s.commits.append(ch); s.marks[app]=(ver,len(s.commits)); assert res.commit_id==len(s.commits) and not res.already_applied
        else:
            assert res is None,(res,); s.marks[app]=(ver,None)
    def crash(s):
        w=s.writer(); 
        kind=s.r.choice([FaultKind.CRASH_BEFORE,FaultKind.CRASH_AFTER]); 
        req=s.r.choice(["PUT","PUT_IF","PUT","DELETE_IF","LIST"]); nth=s.r.randint(1,6)
        w.fail(kind,req,"*",nth=nth)
        rows=s.rows(); ch=s.model(rows)
        app=s.r.choice("pqrstu"); ver=1000+len(s.log)
        last=s.marks.get(app)
        try:
            w.commit(*s.inputs(rows), idempotency=Idempotency(app,ver)); w.repo.flush()
        except SimulatedCrash: pass
        except OntologiaError as e: print("typed in crash",e)
        if not w.store.crashed: w.heal()
        s.w.pass_lease()
        # retry elsewhere
        w2=s.w.open("retry")
        res=w2.commit(*s.inputs(rows), idempotency=Idempotency(app,ver))
        if ch:
            s.commits.append(ch); s.marks[app]=(ver,len(s.commits)); assert res.commit_id==len(s.commits),(res,)
        else:
            assert res is None; s.marks[app]=(ver,None)
    def compact(s): compact(s.w.open("compactor").repo, CompactionPolicy(min_entries=2, ratio=s.r.choice([1.5,100.0])))
    def collect(s):
        repo=s.w.open("gc").repo
        sweep(repo, plan_gc(repo, grace=timedelta(seconds=s.r.choice([0,0,60,3600])), purge_compacted=s.r.random()<.7))
    def tag(s):
        if not s.commits: return
        n=f"t{len(s.log)}"; c=s.r.randint(1,len(s.commits))
        try: s.w.open("tagger").repo.create_tag(n,c); s.tags[n]=c
        except OntologiaError as e: s.log.append("tagfail "+str(e))
    def untag(s):
        if s.tags:
            n=s.r.choice(sorted(s.tags)); s.w.open("tagger").repo.delete_tag(n); del s.tags[n]
    def restore(s):
        if not s.commits: return
        c=s.r.randint(1,len(s.commits))
        ch={}
        for t in range(8):
            old=s.state_of(c,t); now=s.state_of(len(s.commits),t)
            d={k:v for k,v in old.items() if now[k]!=v}
            if d: ch[t]=d
        r=restore(s.w.open("restorer").repo, c, apply=True)
        assert (r.new_commit_id is not None)==bool(ch)
        if ch: s.commits.append(ch)
    def sleep(s): s.w.backend.clock.sleep(s.r.choice([40,100,4000]))
    def flush(s): s.writer().repo.flush()
    def reopen(s):
        n=s.r.choice("AB"); w=s.writers.pop(n,None)
        if w and not w.store.crashed: w.repo.flush(); 
    def snapshot_objs(s): return dict(s.w.backend.objects())
    def copy(s):
        """Copy in worst order: head first, then work goes on, then others; continue in the copy."""
        for w in s.writers.values():
            if not w.store.crashed: w.repo.flush()
        head=s.w.backend.objects()[layout.HEAD]
        keep=(list(s.commits),dict(s.marks),dict(s.tags))
        for _ in range(s.r.randint(0,4)):
            s.write()
        for w in s.writers.values():
            if not w.store.crashed: w.repo.flush()
        objs=dict(s.w.backend.objects()); objs[layout.HEAD]=head
        name=f"copy-{uuid.uuid4().hex}"
        b=memory_backend(name); b.clock=s.w.backend.clock
        ks=list(objs); s.r.shuffle(ks)
        for k in ks: b.write(k,objs[k])
        s.w=World(b,s.engine); s.writers={}
        s.commits,s.marks,s.tags=keep
    def rewind(s):
        """head put back to an older version; sessions closed."""
        for w in s.writers.values():
            if not w.store.crashed: w.repo.flush()
        head=s.w.backend.objects()[layout.HEAD]
        keep=(list(s.commits),dict(s.marks),dict(s.tags))
        for _ in range(s.r.randint(1,5)):
            s.r.choice([s.write,s.unit,s.compact])()
        for w in s.writers.values():
            if not w.store.crashed: w.repo.flush()
        if s.r.random()<.3: s.writers={}
        s.w.backend.write(layout.HEAD, head)
        s.commits,s.marks,s.tags=keep
    def repair(s): repair_indices(s.w.open("rep").repo, apply=True) if 'apply' in repair_indices.__code__.co_varnames else repair_indices(s.w.open("rep").repo)
    def dropindex(s):
        ks=[k for k in s.w.backend.objects() if k.startswith(layout.INDEX_FOLDERS)]
        if ks: s.w.backend.remove([s.r.choice(ks)])
    def check(s):
        for w in [s.w.open("reader"), *[w for w in s.writers.values() if not w.store.crashed]]:
            for t,spec in enumerate(TYPES):
                got={r["entity_key"]:r["age"] for r in w.rows(spec)}
                assert got==s.state_of(len(s.commits),t),(t,got,s.state_of(len(s.commits),t))
        w=s.w.open("reader")
        for t,spec in enumerate(TYPES):
            h=sorted((r["commit_id"],r["entity_key"],r["age"]) for r in w.rows(spec,HISTORY))
            want=sorted((i+1,k,v) for i,c in enumerate(s.commits) for k,v in c.get(t,{}).items())
            assert h==want,(t,h,want)
    def deep(s):
        for w in s.writers.values():
            if not w.store.crashed: w.repo.flush()
        rep=verify_storage(s.w.open("v").repo,deep=True)
        bad=[f for f in rep.findings]
        return bad
def run(seed,engine,steps=45):
    s=Run(seed,engine)
    try:
        for i in range(steps):
            s.step()
            if i%4==3: s.check()
        s.check()
        bad=s.deep()
        for app,(v,c) in s.marks.items():
            u=s.w.open("m").repo.applied(Idempotency(app,v)); assert u is not None,(app,v)
        errs=[f for f in bad]
        return errs
    except Exception:
        print("SEED",seed,engine,s.log[-12:]); traceback.print_exc(limit=-6); return None
if __name__=="__main__":
    a,b=int(sys.argv[1]),int(sys.argv[2])
    for seed in range(a,b):
        e="v1" if seed%4==3 else "v2"
        r=run(seed,e)
        print(seed,e,"FAIL" if r is None else [str(f)[:160] for f in r][:4], flush=True)
