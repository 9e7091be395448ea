import sys, time, os, torch
torch.set_grad_enabled(False)
from pathlib import Path
import tempfile, json
from megakernel_tts.random_checkpoint import write_checkpoint
from megakernel_tts.loader import load_checkpoint
from megakernel_tts.reference import Reference
from megakernel_tts.cuda import Megakernel
from megakernel_tts.sampling import Sampling
from megakernel_tts.checkpoint import map_leaves
from megakernel_tts.weights import model_specs
from megakernel_tts.config import read_model_config
from megakernel_tts.layers import rms_norm
from tests.test_released_sizes import released
t=time.time()
import build_ext; build_ext.load(); print('build',round(time.time()-t,1),flush=True)
dev=torch.device('cuda')
def section(name):
    print('==',name,flush=True)
for size in ('0b6','1b7'):
    section('tiny '+size)
    d=Path(tempfile.mkdtemp()); write_checkpoint(d,'custom_voice',size,codes=256)
    L=load_checkpoint(d,dev,torch.bfloat16,4)
    mk=L.engine.backend; print(mk.name)
    C=load_checkpoint(d,torch.device('cpu'),torch.float32,4)
    ref=C.engine.backend
    half=map_leaves(ref.model,lambda x:x.bfloat16())
    refh=Reference(half,C.config,C.engine.prompter.pad[0].bfloat16(),slots=4,positions=512)
    prefix=C.engine.prompter.prefix('ryan','english',None)
    ids=C.tokenizer.encode("hello to the world")
    pr=C.engine.prompter.start(prefix,ids,'streaming',ended=True)
    text=torch.cat([C.engine.prompter.text(ids[1:]),C.engine.prompter.eos])
    g=Sampling.greedy(seed=0)
    for r,dt in ((ref,torch.float32),(refh,torch.bfloat16)):
        r.prefill(0,pr.prefill.to(dt),g,0); r.feed(0,text.to(dt),True)
    mk.prefill(0,pr.prefill.bfloat16().cuda(),g,0); mk.feed(0,text.bfloat16().cuda(),True)
    h=rms_norm(mk._hidden[0].float()[None].cpu(),ref.model.talker.stack.norm,1e-6)[0]
    print('hidden err',(h-ref._state[0].hidden).abs().max().item(),'bf16 torch',(refh._state[0].hidden.float()-ref._state[0].hidden).abs().max().item())
    for i in range(2):
        print('mk  ',mk.step([0])[0].tolist()); print('ref ',ref.step([0])[0].tolist()); print('half',refh.step([0])[0].tolist(),flush=True)
    mk.release(0)
    ss=[Sampling(seed=1),g,Sampling(seed=3,top_p=0.8,temperature=1.2,repetition_penalty=1.5),Sampling(seed=4)]
    def begin(slot,i):
        mk.prefill(slot,pr.prefill[i:].bfloat16().cuda().contiguous(),ss[i],0); mk.feed(slot,text.bfloat16().cuda(),True)
    alone=[]
    for i in range(4):
        begin(3-i,i); alone.append([None if (c:=mk.step([3-i])[0]) is None else c.tolist() for _ in range(12)]); mk.release(3-i)
    for i in range(4): begin(i,i)
    tog=[[None if c is None else c.tolist() for c in mk.step([0,1,2,3])] for _ in range(12)]
    print('batch==solo',[[t[i] for t in tog]==alone[i] for i in range(4)],flush=True)
    L.engine.close(); C.engine.close()
for size,hidden,inter in (('0b6',1024,3072),('1b7',2048,6144)):
    section('full '+size)
    d=Path(tempfile.mkdtemp()); write_checkpoint(d,'custom_voice',size,codes=256)
    config=read_model_config(released(d/'config.json',d/'c.json',hidden,inter))
    gen=torch.Generator('cuda').manual_seed(0)
    def weight(spec):
        n=torch.randn(spec.shape,device='cuda',generator=gen)
        return (1.0+0.1*n if len(spec.shape)==1 else 0.02*n).bfloat16()
    model=map_leaves(model_specs(config),weight)
    pad=torch.randn(hidden,device='cuda',generator=gen).bfloat16()
    mk=Megakernel(model,config,pad,slots=8,positions=2048)
    prompts=[0.05*torch.randn(10,hidden,device='cuda',generator=gen).bfloat16() for i in range(8)]
    f32=map_leaves(model,lambda x:x.float())
    ref=Reference(f32,config,pad.float(),slots=1,positions=64); refh=Reference(model,config,pad,slots=1,positions=64)
    g=Sampling.greedy(seed=0)
    for r in (ref,refh): r.prefill(0,prompts[0].to(r._pad.dtype),g,0)
    mk.prefill(0,prompts[0],g,0)
    h=rms_norm(mk._hidden[0].float()[None],f32.talker.stack.norm,1e-6)[0]
    print('hidden err',(h-ref._state[0].hidden).abs().max().item(),'bf16 torch',(refh._state[0].hidden.float()-ref._state[0].hidden).abs().max().item())
    del f32,ref,refh
    torch.cuda.synchronize()
    e=[torch.cuda.Event(enable_timing=True) for _ in range(2)]
    e[0].record()
    for _ in range(20): mk.prefill(0,prompts[0],g,0)
    e[1].record(); torch.cuda.synchronize(); print('prefill 10 positions ms',e[0].elapsed_time(e[1])/20)
    s=Sampling(seed=1)
    for n in (1,2,4,8):
        for slot in range(n):
            mk.prefill(slot,prompts[slot],Sampling(seed=slot),0); mk.feed(slot,pad[None][:0],True)
        for frames in (16,):
            for _ in range(3): mk.step(list(range(n)))
            torch.cuda.synchronize(); e[0].record()
            for _ in range(frames): mk.step(list(range(n)))
            e[1].record(); torch.cuda.synchronize(); print(n,'streams: ms a frame',round(e[0].elapsed_time(e[1])/frames,3),flush=True)
    # deep positions
    for slot in range(1):
        st=mk._state[0]; st.prompt=500
        for _ in range(3): mk.step([0])
        torch.cuda.synchronize(); e[0].record()
        for _ in range(16): mk.step([0])
        e[1].record(); torch.cuda.synchronize(); print('position 500: ms',round(e[0].elapsed_time(e[1])/16,3))
    # many frames in a launch
    mk._frames=torch.zeros(8*64,17,dtype=torch.int32).pin_memory(); mk._mailbox[0]=mk._frames
    mk._put([0],[mk._state[0]]); 
    torch.cuda.synchronize(); e[0].record(); mk._ops.generate(mk._model,*mk._lists(),32); e[1].record(); torch.cuda.synchronize()
    print('32 frames in one launch: ms a frame',e[0].elapsed_time(e[1])/32, 'failure',mk._failure.tolist())
    del mk, model
    torch.cuda.empty_cache()
