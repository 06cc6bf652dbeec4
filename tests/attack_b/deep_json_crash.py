import sys,os
from storage_engine import Session
def t(q):
    pid=os.fork()
    if pid==0:
        try:
            with Session('/tmp/ab/st') as s: s.sql(q).to_arrow()
            os._exit(0)
        except BaseException: os._exit(0)
    return os.waitpid(pid,0)[1]
for name,q in {"json_structure":"SELECT json_structure(repeat('[',{D})||repeat(']',{D}))",
 "merge":"SELECT json_merge_patch(repeat('{{\"a\":',{D})||'1'||repeat('}}',{D}), repeat('{{\"a\":',{D})||'1'||repeat('}}',{D}))",
 "contains":"SELECT json_contains(repeat('[',{D})||repeat(']',{D}), '1')",
 "variant":"SELECT (repeat('[',{D})||repeat(']',{D}))::JSON::VARIANT::VARCHAR",
 "transform":"SELECT json_transform('[1]', repeat('[',{D})||'\"INT\"'||repeat(']',{D}))",
 "group":"SELECT json_group_structure(x) FROM (SELECT repeat('[',{D})||repeat(']',{D}) x FROM range(3))",
 "pretty":"SELECT length(json_pretty(repeat('[',{D})||repeat(']',{D})))",
 "tojson":"SELECT to_json((repeat('[',{D})||repeat(']',{D}))::JSON)",
 "valid":"SELECT json_valid(repeat('[',{D})||repeat(']',{D}))","keys":"SELECT json_keys(repeat('[',{D})||repeat(']',{D}))",
 "path":"SELECT json_extract('[1]', '$'||repeat('[*]',{D}))",
 "glob":"SELECT ''||('a' GLOB repeat('*a',{D}))", "like":"SELECT repeat('a',{D}) LIKE repeat('%a',{D})",
 "regex":"SELECT regexp_matches('a', repeat('(',{D})||'a'||repeat(')',{D}))",
 "strlist":"SELECT (repeat('[',{D})||repeat(']',{D}))::VARCHAR[]",
 "cast_type":"SELECT json_transform('{{}}', repeat('{{\"a\":',{D})||'\"INT\"'||repeat('}}',{D}))",
 "fmt":"SELECT format(repeat('{{',{D}),1)","fmt2":"SELECT length(format('{{:'||repeat('{{',{D})||'}}',1))",
 "geom":"SELECT st_astext((repeat('GEOMETRYCOLLECTION(',{D})||'POINT(1 1)'||repeat(')',{D}))::GEOMETRY)",
 "struct":"SELECT (repeat('{{a:',{D})||'1'||repeat('}}',{D}))::STRUCT(a VARCHAR)",
}.items():
    r=[(D,t(q.format(D=D))) for D in (1000,10000,50000)]
    print(name,r,flush=True)
