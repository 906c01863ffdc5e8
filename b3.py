from bat import *
def f():
    t=KTOTrainer(model(),args=KTOConfig(**base(per_device_train_batch_size=1,gradient_accumulation_steps=1,tropism_options={"store":"/tmp/rb/store"})),train_dataset=kto(12),processing_class=tok); t.train(); return t.state.log_history
case("kto bs1",f)
case("lr str",lambda:KTOConfig(learning_rate="1e-4"))
