import faulthandler,sys,os,time,threading; import signal; faulthandler.register(signal.SIGUSR1,all_threads=True,file=open("/tmp/ab/trace","w")); sys.path.insert(0,'/tmp/ab')
import shutil
from models import *
from storage_engine import Session, initialize_storage
U='/tmp/ab/f1'; FORK=sys.argv[1]=='fork'; N=int(sys.argv[2])
shutil.rmtree(U,ignore_errors=True); initialize_storage(U)
print("parent",os.getpid())
stop=threading.Event()
def work(n):
    with Session(U) as t:
        i=0
        while not stop.is_set():
            t.ensure(Customer(id=f"w{n}-{i}",name="x",age=i)); i+=1
            try: t.commit()
            except BaseException as e: print("thread",n,i,str(e)[:120],[x.name for x in threading.enumerate()],flush=True); stop.set(); return
    print("thread",n,"commits",i)
th=[threading.Thread(target=work,args=(n,)) for n in range(2)]
[t.start() for t in th]
def child():
    with Session(U) as s:
        s.ensure(Customer(id=f"k{os.getpid()}",name="x",age=1)); s.commit()
for k in range(N):
    time.sleep(.05)
    if stop.is_set(): break
    if FORK:
        pid=os.fork()
        if pid==0:
            try: child(); os._exit(0)
            except BaseException as e: print("  child",os.getpid(),type(e).__name__,str(e)[:120],flush=True); os._exit(3)
        t=time.time(); os.waitpid(pid,0)
        if time.time()-t>3: print("child",pid,"took",time.time()-t)
stop.set(); [t.join() for t in th]
