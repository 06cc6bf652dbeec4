import tarfile, shutil, glob, os, sys, traceback, logging
logging.disable(logging.CRITICAL)
from datetime import timedelta
from pathlib import Path
from storage_engine.config import OntologiaConfig
from storage_engine.repository import open_repository, ReadWindow, CommitRequest, TypeInput, Idempotency
from storage_engine.maintenance.compaction import CompactionPolicy, compact
from storage_engine.maintenance.compaction.background import keep_compact
from storage_engine.maintenance.compaction.plan import TierPolicy
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.maintenance.rows import stored_types
from tests.engines import CUSTOMER, rows_of, commit
from storage_engine.model import Entity, Field, spec_of
class Zed(Entity):
    id: Field[str]=Field(primary_key=True)
    n: Field[int]
Z=spec_of(Zed)
def base(repo, upto):
    h=repo.chain.read_head().head; out={}
    for spec in stored_types(repo,h):
        if spec.name=="Zed": continue
        for c in range(1,upto+1):
            try: out[spec.ref,c]=sorted(map(str,repo.read(spec,ReadWindow(as_of=c)).to_pylist()))
            except Exception as e: out[spec.ref,c]=repr(e)[:200]
        out[spec.ref,"h"]=sorted(map(str,repo.read(spec,ReadWindow(history=True)).to_pylist()))
    return out
for a in sorted(glob.glob("tests/compatibility/storages/0.1.0/directory-*.tar.gz")):
    shutil.rmtree("/tmp/aa_old",ignore_errors=True); os.makedirs("/tmp/aa_old")
    tarfile.open(a).extractall("/tmp/aa_old",filter="data")
    root="/tmp/aa_old/shop"; uri="file://"+root
    try:
        r=open_repository(uri,OntologiaConfig()); n=r.head_commit_id(); b0=base(r,n); r.close()
        head0=Path(root+"/meta/head.json").read_bytes()
        r=open_repository(uri,OntologiaConfig(checkpoint_interval=3)); keep_compact(r,TierPolicy(tail=3,cut_off=2))
        for i in range(8):
            commit(r, rows_of(Z,{"entity_key":"z","id":"z","n":i})); commit(r,idempotency=Idempotency(f"ap{i}",i))
        r.flush(); r.create_tag("tt",n) ; r.close()
        r=open_repository(uri,OntologiaConfig()); b1=base(r,n)
        bad=[k for k in b0 if b0[k]!=b1.get(k)]
        compact(r,CompactionPolicy(min_entries=2,ratio=1000.0))
        for _ in range(2): sweep(r,plan_gc(r,grace=timedelta(0),purge_compacted=True))
        r.delete_tag("tt"); sweep(r,plan_gc(r,grace=timedelta(0),purge_compacted=True)); r.close()
        r=open_repository(uri,OntologiaConfig()); b2=base(r,n)
        bad2=[k for k in b0 if b0[k]!=b2.get(k)]
        v=verify_storage(r,deep=True).findings; r.close()
        print(os.path.basename(a), n, len(b0), "bad",bad[:3],bad2[:3],"verify",[str(f)[:200] for f in v][:3])
        # now: forward, then head put back to the 0.1.0 head
        shutil.rmtree("/tmp/aa_old",ignore_errors=True); os.makedirs("/tmp/aa_old"); tarfile.open(a).extractall("/tmp/aa_old",filter="data")
        r=open_repository(uri,OntologiaConfig(checkpoint_interval=3)); keep_compact(r,TierPolicy(tail=3,cut_off=2))
        for i in range(8): commit(r, rows_of(Z,{"entity_key":"z","id":"z","n":i}))
        compact(r,CompactionPolicy(min_entries=2,ratio=1000.0)); r.close()
        p=Path(root+"/meta/head.json"); p.write_bytes(head0)
        r=open_repository(uri,OntologiaConfig(checkpoint_interval=2)); b3=base(r,n); bad3=[k for k in b0 if b0[k]!=b3.get(k)]
        for i in range(5): commit(r, rows_of(Z,{"entity_key":"y","id":"y","n":i}))
        assert [x["entity_key"] for x in r.read(Z,ReadWindow()).to_pylist()]==["y"]
        compact(r,CompactionPolicy(min_entries=2,ratio=3.0)); r.flush(); b4=base(r,n); bad4=[k for k in b0 if b0[k]!=b4.get(k)]; r.close()
        r=open_repository(uri,OntologiaConfig()); v=verify_storage(r,deep=True).findings; r.close()
        print("   rewind", bad3[:3],bad4[:3],[str(f)[:160] for f in v][:3])
    except Exception: traceback.print_exc(limit=-5); print("FAILED",a)
