import sys,os,time,signal,threading,multiprocessing as mp,asyncio; sys.path.insert(0,'/tmp/ab')
import shutil
from models import *
from storage_engine import Session, initialize_storage
U='/tmp/ab/f'
def child_new(u):   # preloaded parent with an open session; the child opens its own
    with Session(u) as s:
        s.ensure(Customer(id=f"k{os.getpid()}",name="x",age=1)); s.commit()
        s.sql("select count(*) from Customer").collect()
def watch(pid,what,limit=15):
    t=time.time()
    while time.time()-t<limit:
        p,st=os.waitpid(pid,os.WNOHANG)
        if p: print(what,"ok" if st==0 else f"status {st}",f"{time.time()-t:.1f}s",flush=True); return
        time.sleep(.05)
    print("!!!! HANG",what,flush=True); os.kill(pid,9); os.waitpid(pid,0)
def lockfree(u):
    import subprocess
    print("   lock:",os.path.exists(u+'/locks') and os.listdir(u+'/locks'), [x for x in os.popen(f"find {u} -name '*lock*'").read().split()])
for u in (U,'sqlite:////tmp/ab/f.db'):
    shutil.rmtree(U,ignore_errors=True); [os.remove(f'/tmp/ab/{x}') for x in os.listdir('/tmp/ab') if x.startswith('f.db')]
    initialize_storage(u)
    s=Session(u); s.ensure(Customer(id="a",name="a",age=1)); s.commit(); s.sql("from Customer").collect()
    # 1 gunicorn-like
    pid=os.fork()
    if pid==0:
        try: child_new(u); os._exit(0)
        except BaseException as e: print(repr(e)); os._exit(3)
    watch(pid,u+" preload child opens its own")
    # 2 child uses the parent's
    pid=os.fork()
    if pid==0:
        try:
            s.ensure(Customer(id="b",name="a",age=1)); s.commit(); os._exit(0)
        except BaseException as e: print(type(e).__name__,str(e)[:150]); os._exit(3)
    watch(pid,u+" child uses parent's session")
    # 3 child ends normally via sys.exit (atexit, gc) with parent's session open and stream under way
    rows=s.sql("select * from range(3000000) t(n)"); it=iter(rows.batches()) if hasattr(rows,'batches') else None
    first=next(it) if it else None
    pid=os.fork()
    if pid==0:
        del first
        it=None; rows=None
        import gc; gc.collect()
        sys.exit(0)
    watch(pid,u+" child exits normally with a stream under way")
    # 4 child closes parent's session / iterates the stream
    pid=os.fork()
    if pid==0:
        try: print("next in child", next(it).num_rows)
        except BaseException as e: print("  next in child:",type(e).__module__,type(e).__name__,str(e)[:100])
        try: s.close()
        except BaseException as e: print("  close in child:",type(e).__name__)
        os._exit(0)
    watch(pid,u+" child iterates parent's stream and closes")
    # 5 fork while a thread commits
    stop=threading.Event(); errs=[]
    def work(n):
        with Session(u) as t:
            i=0
            while not stop.is_set():
                t.ensure(Customer(id=f"w{n}-{i}",name="x",age=i)); i+=1
                try: t.commit()
                except BaseException as e: errs.append(e); return
                t.sql("select count(*) from Customer").collect()
    th=[threading.Thread(target=work,args=(n,)) for n in range(2)]
    [t.start() for t in th]
    for k in range(12):
        time.sleep(.05)
        pid=os.fork()
        if pid==0:
            try: child_new(u); os._exit(0)
            except BaseException as e: print("  ",type(e).__name__,str(e)[:200]); os._exit(3)
        watch(pid,f"{u} fork {k} during commits")
    stop.set(); [t.join() for t in th]; print("errs",errs[:2])
    rest=sum(b.num_rows for b in it); print("rest of stream",rest)
    s.close()
    # 6 multiprocessing fork child without close
    def noclose(u):
        x=Session(u); x.ensure(Customer(id=f"m{os.getpid()}",name="x",age=1)); x.commit()
    for m in ("fork",):
        p=mp.get_context(m).Process(target=noclose,args=(u,)); p.start(); p.join(15)
        print(m,"exit",p.exitcode); 
        if p.is_alive(): p.kill()
    if u==U: lockfree(u)
