<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE TS>
<TS version="2.1" language="es" sourcelanguage="en">
    <context>
        <name>AboutCard</name>
        <message>
            <source>About</source>
            <translation>Acerca de</translation>
        </message>
        <message>
            <source>Licences</source>
            <translation>Licencias</translation>
        </message>
        <message>
            <source>Open logs</source>
            <translation>Abrir registros</translation>
        </message>
        <message>
            <source>Switchyard {0}</source>
            <translation>Switchyard {0}</translation>
        </message>
        <message>
            <source>Python {0}, Qt {1}</source>
            <translation>Python {0}, Qt {1}</translation>
        </message>
        <message>
            <source>Logs</source>
            <translation>Registros</translation>
        </message>
        <message>
            <source>Contain no prompts and no answers: {0}</source>
            <translation>No contienen prompts ni respuestas: {0}</translation>
        </message>
        <message>
            <source>Save report…</source>
            <translation>Guardar informe…</translation>
        </message>
        <message>
            <source>Report</source>
            <translation>Informe</translation>
        </message>
        <message>
            <source>One file to attach to a bug report: versions, hardware, findings and the end of the logs. </source>
            <translation>Un archivo para adjuntar al informe de un fallo: versiones, hardware, lo detectado y el final de los registros. </translation>
        </message>
        <message>
            <source>No prompts, no names; nothing is sent.</source>
            <translation>Sin prompts ni nombres; no se envía nada.</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>Examinando este PC…</translation>
        </message>
        <message>
            <source>It is in {0}: read it before you pass it on.</source>
            <translation>Está en {0}: léalo antes de entregarlo.</translation>
        </message>
    </context>
    <context>
        <name>AnswerCard</name>
        <message>
            <source>Answers</source>
            <translation>Respuestas</translation>
        </message>
        <message>
            <source>More sampling…</source>
            <translation>Más ajustes…</translation>
        </message>
        <message>
            <source>Max</source>
            <translation>Máx.</translation>
        </message>
        <message>
            <source>tokens</source>
            <translation>tokens</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>Temperatura</translation>
        </message>
        <message>
            <source>Max tokens per answer</source>
            <translation>Tokens máx. por respuesta</translation>
        </message>
        <message>
            <source>Answer must be</source>
            <translation>Forma de la respuesta</translation>
        </message>
        <message>
            <source>Text</source>
            <translation>Texto</translation>
        </message>
        <message>
            <source>One of choices</source>
            <translation>Una de varias opciones</translation>
        </message>
        <message>
            <source>JSON with a schema</source>
            <translation>JSON con un esquema</translation>
        </message>
        <message>
            <source>Choices</source>
            <translation>Opciones</translation>
        </message>
        <message>
            <source>One choice per line, such as
positive
negative</source>
            <translation>Una opción por línea, por ejemplo
positivo
negativo</translation>
        </message>
        <message>
            <source>JSON schema</source>
            <translation>Esquema JSON</translation>
        </message>
        <message>
            <source>Enter at least two choices, one per line.</source>
            <translation>Introduzca al menos dos opciones, una por línea.</translation>
        </message>
        <message>
            <source>Enter the JSON schema that answers must follow.</source>
            <translation>Introduzca el esquema JSON que deben seguir las respuestas.</translation>
        </message>
        <message>
            <source>The schema is not a JSON object.</source>
            <translation>El esquema no es un objeto JSON.</translation>
        </message>
        <message>
            <source>The schema is not JSON: {0}.</source>
            <translation>El esquema no es JSON válido: {0}.</translation>
        </message>
        <message>
            <source>Default answer settings</source>
            <translation>Ajustes predeterminados de respuesta</translation>
        </message>
    </context>
    <context>
        <name>AnswerMessage</name>
        <message>
            <source>Copy the answer</source>
            <translation>Copiar la respuesta</translation>
        </message>
        <message>
            <source>Answer again</source>
            <translation>Responder de nuevo</translation>
        </message>
        <message>
            <source>Continue in a new chat</source>
            <translation>Continuar en un chat nuevo</translation>
        </message>
        <message>
            <source>Edit the answer</source>
            <translation>Editar la respuesta</translation>
        </message>
        <message>
            <source>Delete the answer</source>
            <translation>Eliminar la respuesta</translation>
        </message>
        <message>
            <source>Continue</source>
            <translation>Continuar</translation>
        </message>
        <message>
            <source>Restart engine</source>
            <translation>Reiniciar el motor</translation>
        </message>
        <message>
            <source>Fold earlier turns</source>
            <translation>Resumir los mensajes anteriores</translation>
        </message>
        <message>
            <source>The model summarises them, and reads the summary instead.</source>
            <translation>El modelo los resume y lee el resumen en su lugar.</translation>
        </message>
        <message>
            <source>Leave out the oldest</source>
            <translation>Omitir los más antiguos</translation>
        </message>
        <message>
            <source>The engine is not running. Restart it to get your answer.</source>
            <translation>El motor no está en marcha. Reinícielo para obtener su respuesta.</translation>
        </message>
        <message>
            <source>folded, not sent</source>
            <translation>resumido, no enviado</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Copiado</translation>
        </message>
    </context>
    <context>
        <name>AnswerView</name>
        <message>
            <source>Answer</source>
            <translation>Respuesta</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Copiar</translation>
        </message>
        <message>
            <source>Copy link</source>
            <translation>Copiar enlace</translation>
        </message>
        <message>
            <source>Select all</source>
            <translation>Seleccionar todo</translation>
        </message>
        <message>
            <source>Copy all as plain text</source>
            <translation>Copiar todo como texto sin formato</translation>
        </message>
        <message>
            <source>Copy all as Markdown</source>
            <translation>Copiar todo como Markdown</translation>
        </message>
    </context>
    <context>
        <name>ApiServer</name>
        <message>
            <source>Port {0} is in use by another program, or not allowed. Choose another one.</source>
            <translation>El puerto {0} lo usa otro programa o no está permitido. Elija otro.</translation>
        </message>
        <message>
            <source>The server stopped unexpectedly. Turn it off and on again.</source>
            <translation>El servidor se detuvo inesperadamente. Desactívelo y vuelva a activarlo.</translation>
        </message>
        <message>
            <source>The server could not be started. Reinstall Switchyard.</source>
            <translation>No se pudo iniciar el servidor. Reinstale Switchyard.</translation>
        </message>
    </context>
    <context>
        <name>Asking</name>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>A batch job is running.</source>
            <translation>Hay una tarea por lotes en curso.</translation>
        </message>
        <message>
            <source>Loading a model pauses it. No answered row is lost: you can resume it later, with the same model and precision.</source>
            <translation>Cargar un modelo la pausa. No se pierde ninguna fila respondida: podrá reanudarla más tarde con el mismo modelo y la misma precisión.</translation>
        </message>
        <message>
            <source>Pause the job</source>
            <translation>Pausar la tarea</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>Hay {0} tarea por lotes en curso.</numerusform>
                <numerusform>Hay {0} tareas por lotes en curso.</numerusform>
            </translation>
        </message>
        <message>
            <source>Loading a model pauses them. No answered row is lost: you can resume them later, with the same model and precision.</source>
            <translation>Cargar un modelo las pausa. No se pierde ninguna fila respondida: podrá reanudarlas más tarde con el mismo modelo y la misma precisión.</translation>
        </message>
        <message>
            <source>Pause the jobs</source>
            <translation>Pausar las tareas</translation>
        </message>
    </context>
    <context>
        <name>Attaching</name>
        <message>
            <source>A message takes up to {0} documents: attach the folder that they are in.</source>
            <translation>Un mensaje admite hasta {0} documentos: adjunte la carpeta que los contiene.</translation>
        </message>
    </context>
    <context>
        <name>AttachmentChip</name>
        <message>
            <source>Remove {0}</source>
            <translation>Quitar {0}</translation>
        </message>
    </context>
    <context>
        <name>Batch</name>
        <message>
            <source>Row {0}</source>
            <translation>Fila {0}</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} tokens</translation>
        </message>
        <message>
            <source>The row {0}.</source>
            <translation>La fila: {0}.</translation>
        </message>
        <message>
            <source>(an empty answer)</source>
            <translation>(respuesta vacía)</translation>
        </message>
        <message>
            <source>Files of prompts</source>
            <translation>Archivos de prompts</translation>
        </message>
        <message>
            <source>tomorrow {0}</source>
            <translation>mañana {0}</translation>
        </message>
        <message>
            <source>d MMM</source>
            <translation>d MMM</translation>
        </message>
        <message>
            <source>d MMM yyyy</source>
            <translation>d MMM yyyy</translation>
        </message>
        <message>
            <source>One row</source>
            <translation>Una fila</translation>
        </message>
        <message>
            <source>{0} to {1} tokens/s</source>
            <translation>{0} a {1} tokens/s</translation>
        </message>
        <message>
            <source>done between {0} and {1}</source>
            <translation>listo entre {0} y {1}</translation>
        </message>
        <message>
            <source>done at about {0}</source>
            <translation>listo hacia {0}</translation>
        </message>
        <message>
            <source>Measured on the trial rows, ±{0}.</source>
            <translation>Medido con las filas de prueba, ±{0}.</translation>
        </message>
        <message>
            <source>done by {0} even if every answer takes all {1} tokens</source>
            <translation>listo a las {0} aunque cada respuesta use sus {1} tokens</translation>
        </message>
        <message>
            <source>Predicted, ±{0}; a trial of the first rows is more exact.</source>
            <translation>Previsto, ±{0}; una prueba de las primeras filas es más exacta.</translation>
        </message>
        <message>
            <source>One row at a time: {0} tokens/s.</source>
            <translation>Una fila cada vez: {0} tokens/s.</translation>
        </message>
        <message>
            <source>Context of these rows: up to {0} of memory.</source>
            <translation>Contexto de estas filas: hasta {0} de memoria.</translation>
        </message>
        <message>
            <source>Rows are answered one at a time</source>
            <translation>Las filas se responden de una en una</translation>
        </message>
        <message>
            <source>{0} rows share each load of a layer's weights</source>
            <translation>{0} filas comparten cada carga de los pesos de una capa</translation>
        </message>
        <message>
            <source>Measured {2} tokens/s, slower than the {0} to {1} predicted: other programs may be busy, or rows longer than the first ones. The time left is based on the measured rate.</source>
            <translation>Medido: {2} tokens/s, más lento que los {0} a {1} previstos: quizá haya otros programas ocupados o filas más largas que las primeras. El tiempo restante se basa en la velocidad medida.</translation>
        </message>
        <message>
            <source>Measured {2} tokens/s, faster than the {0} to {1} predicted. The time left is based on the measured rate.</source>
            <translation>Medido: {2} tokens/s, más rápido que los {0} a {1} previstos. El tiempo restante se basa en la velocidad medida.</translation>
        </message>
        <message>
            <source>Expected: {0} to {1} tokens/s.</source>
            <translation>Esperado: {0} a {1} tokens/s.</translation>
        </message>
        <message>
            <source>Limited by CPU compute.</source>
            <translation>Limitado por el cálculo de la CPU.</translation>
        </message>
        <message>
            <source>Limited by reading weights from RAM.</source>
            <translation>Limitado por la lectura de pesos de la RAM.</translation>
        </message>
        <message>
            <source>Limited by attention on the CPU.</source>
            <translation>Limitado por la atención en la CPU.</translation>
        </message>
        <message>
            <source>Limited by reading experts from disk.</source>
            <translation>Limitado por la lectura de expertos del disco.</translation>
        </message>
        <message>
            <source>Limited by the link to the card.</source>
            <translation>Limitado por el enlace con la tarjeta.</translation>
        </message>
        <message>
            <source>Limited by GPU compute.</source>
            <translation>Limitado por el cálculo de la GPU.</translation>
        </message>
        <message>
            <source>running</source>
            <translation>en curso</translation>
        </message>
        <message>
            <source>waiting</source>
            <translation>en espera</translation>
        </message>
        <message>
            <source>waiting, place {0}</source>
            <translation>en espera, puesto {0}</translation>
        </message>
        <message>
            <source>stopping</source>
            <translation>deteniéndose</translation>
        </message>
        <message>
            <source>paused</source>
            <translation>en pausa</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>detenida</translation>
        </message>
        <message>
            <source>done</source>
            <translation>listo</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>error</translation>
        </message>
        <message>
            <source>runs elsewhere</source>
            <translation>se ejecuta en otro lugar</translation>
        </message>
        <message>
            <source>1 row done</source>
            <translation>1 fila lista</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows done</source>
            <translation>
                <numerusform>{0} fila lista</numerusform>
                <numerusform>{0} filas listas</numerusform>
            </translation>
        </message>
        <message numerus="yes">
            <source>{0} of {1} rows</source>
            <translation>
                <numerusform>{0} de {1} fila</numerusform>
                <numerusform>{0} de {1} filas</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} failed</source>
            <translation>{0} con error</translation>
        </message>
        <message>
            <source>{0} cut off</source>
            <translation>{0} cortadas</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>done by {0} at the latest</source>
            <translation>listo a más tardar {0}</translation>
        </message>
        <message>
            <source>Shares the engine with your chat until the answer is complete.</source>
            <translation>Comparte el motor con su chat hasta que la respuesta esté completa.</translation>
        </message>
        <message>
            <source>Reading the file…</source>
            <translation>Leyendo el archivo…</translation>
        </message>
        <message>
            <source>Starts when the engine is ready.</source>
            <translation>Empieza cuando el motor esté listo.</translation>
        </message>
        <message>
            <source>Starts when a job before it is done and a model is loaded.</source>
            <translation>Empieza cuando termine una tarea anterior y haya un modelo cargado.</translation>
        </message>
        <message>
            <source>Saving finished rows…</source>
            <translation>Guardando las filas listas…</translation>
        </message>
        <message>
            <source>Finishing the current layer and saving finished rows…</source>
            <translation>Terminando la capa actual y guardando las filas listas…</translation>
        </message>
        <message>
            <source>Another program is working on this job, such as “switchyard batch”.</source>
            <translation>Otro programa trabaja en esta tarea, por ejemplo «switchyard batch».</translation>
        </message>
        <message>
            <source>All rows are in {0}.</source>
            <translation>Todas las filas están en {0}.</translation>
        </message>
        <message>
            <source>{0} says why rows failed.</source>
            <translation>{0} indica por qué fallaron filas.</translation>
        </message>
        <message>
            <source>Column “problem” says why rows failed.</source>
            <translation>La columna «problem» indica por qué fallaron filas.</translation>
        </message>
        <message>
            <source>Stopped: the answered rows are in {0}.</source>
            <translation>Detenida: las filas respondidas están en {0}.</translation>
        </message>
        <message>
            <source>Resume continues where it stopped.</source>
            <translation>«Reanudar» continúa donde se detuvo.</translation>
        </message>
        <message>
            <source>{0} min {1} s</source>
            <translation>{0} min {1} s</translation>
        </message>
        <message>
            <source>{0} tokens in {1}, {2} tokens/s.</source>
            <translation>{0} tokens en {1}, {2} tokens/s.</translation>
        </message>
        <message>
            <source>{0} s</source>
            <translation>{0} s</translation>
        </message>
        <message>
            <source>Connecting to the Ray cluster…</source>
            <translation>Conectando con el clúster de Ray…</translation>
        </message>
        <message>
            <source>Asking the servers which models they have…</source>
            <translation>Preguntando a los servidores por sus modelos…</translation>
        </message>
        <message>
            <source>Rows are sent to {0}.</source>
            <translation>Las filas se envían a {0}.</translation>
        </message>
        <message>
            <source>Rows are sent to {0} on this PC; no text leaves it.</source>
            <translation>Las filas se envían a {0} en este PC; ningún texto sale de él.</translation>
        </message>
        <message>
            <source> and to </source>
            <translation> y a </translation>
        </message>
        <message>
            <source>Chats go first on this PC.</source>
            <translation>Los chats tienen prioridad en este PC.</translation>
        </message>
        <message>
            <source>This PC answers your chat first.</source>
            <translation>Este PC responde primero a su chat.</translation>
        </message>
        <message>
            <source>The first rows are being answered.</source>
            <translation>Se están respondiendo las primeras filas.</translation>
        </message>
        <message>
            <source>Another job shares the engine.</source>
            <translation>Otra tarea comparte el motor.</translation>
        </message>
        <message>
            <source>{0} other jobs share the engine.</source>
            <translation>Otras {0} tareas comparten el motor.</translation>
        </message>
        <message>
            <source>Chats go on beside it.</source>
            <translation>Los chats continúan a la vez.</translation>
        </message>
        <message>
            <source>complete</source>
            <translation>completa</translation>
        </message>
        <message>
            <source>cut off</source>
            <translation>cortada</translation>
        </message>
        <message>
            <source>context full</source>
            <translation>contexto lleno</translation>
        </message>
        <message>
            <source>No text leaves this PC.</source>
            <translation>Ningún texto sale de este PC.</translation>
        </message>
        <message>
            <source>The rows are sent to a server on this PC; no text leaves it.</source>
            <translation>Las filas se envían a un servidor en este PC; ningún texto sale de él.</translation>
        </message>
        <message>
            <source>The text of every row may be sent to {0}.</source>
            <translation>El texto de cada fila puede enviarse a {0}.</translation>
        </message>
        <message>
            <source>that this PC belongs to</source>
            <translation>al que pertenece este PC</translation>
        </message>
        <message>
            <source>at {0}</source>
            <translation>en {0}</translation>
        </message>
        <message>
            <source>The text of every row is sent to the nodes of the Ray cluster {0}.</source>
            <translation>El texto de cada fila se envía a los nodos del clúster de Ray {0}.</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>Este PC</translation>
        </message>
        <message>
            <source>Not asked: {0}</source>
            <translation>No se le pregunta: {0}</translation>
        </message>
        <message>
            <source>Paused, and asked again later: {0}</source>
            <translation>En descanso; se le volverá a preguntar: {0}</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows at once</source>
            <translation>
                <numerusform>{0} fila a la vez</numerusform>
                <numerusform>{0} filas a la vez</numerusform>
            </translation>
        </message>
        <message>
            <source>1 row at once</source>
            <translation>1 fila a la vez</translation>
        </message>
        <message numerus="yes">
            <source>Measured there on {0} rows: {1} s for a row, {2} tokens read and {3} written.</source>
            <translation>
                <numerusform>Medido allí con {0} fila: {1} s por fila, {2} tokens leídos y {3} escritos.</numerusform>
                <numerusform>Medido allí con {0} filas: {1} s por fila, {2} tokens leídos y {3} escritos.</numerusform>
            </translation>
        </message>
        <message>
            <source>All rows take {0} min at most; asked at once, they take less.</source>
            <translation>Todas las filas tardan como mucho {0} min; enviadas a la vez, tardan menos.</translation>
        </message>
        <message>
            <source>They cost about {0}.</source>
            <translation>Cuestan unos {0}.</translation>
        </message>
        <message>
            <source>{0} row took {1} s, at {2} tokens/s.</source>
            <translation>{0} fila tardó {1} s, a {2} tokens/s.</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows took {1} s, at {2} tokens/s.</source>
            <translation>
                <numerusform>{0} fila tardó {1} s, a {2} tokens/s.</numerusform>
                <numerusform>{0} filas tardaron {1} s, a {2} tokens/s.</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>BatchHead</name>
        <message>
            <source>Batch</source>
            <translation>Lotes</translation>
        </message>
        <message>
            <source>Retry failed</source>
            <translation>Reintentar errores</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>Pausar</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>Reanudar</translation>
        </message>
        <message>
            <source>Open result</source>
            <translation>Abrir resultado</translation>
        </message>
        <message>
            <source>More</source>
            <translation>Más</translation>
        </message>
        <message>
            <source>New job</source>
            <translation>Nueva tarea</translation>
        </message>
        <message>
            <source>Show in folder</source>
            <translation>Mostrar en la carpeta</translation>
        </message>
        <message>
            <source>Stop and keep answers</source>
            <translation>Detener y conservar respuestas</translation>
        </message>
        <message>
            <source>Start over…</source>
            <translation>Empezar de nuevo…</translation>
        </message>
        <message>
            <source>Move up in queue</source>
            <translation>Adelantar en la cola</translation>
        </message>
        <message>
            <source>Move down in queue</source>
            <translation>Atrasar en la cola</translation>
        </message>
        <message>
            <source>Remove from list</source>
            <translation>Quitar de la lista</translation>
        </message>
        <message>
            <source>From a file…</source>
            <translation>Desde un archivo…</translation>
        </message>
        <message>
            <source>From a folder…</source>
            <translation>Desde una carpeta…</translation>
        </message>
    </context>
    <context>
        <name>BatchHint</name>
        <message>
            <source>Show job</source>
            <translation>Mostrar tarea</translation>
        </message>
        <message>
            <source>The engine stopped, so the batch job is paused; no answered row is lost.</source>
            <translation>El motor se detuvo, así que la tarea por lotes está en pausa; no se ha perdido ninguna fila respondida.</translation>
        </message>
        <message>
            <source>The batch job{0} shares the engine with your chat: both are slower until the answer is complete.</source>
            <translation>La tarea por lotes{0} comparte el motor con su chat: ambos van más lentos hasta que la respuesta esté completa.</translation>
        </message>
        <message>
            <source>A batch job is running{0}. Your chats share the engine with it and come first.</source>
            <translation>Hay una tarea por lotes en curso{0}. Sus chats comparten el motor con ella y tienen prioridad.</translation>
        </message>
    </context>
    <context>
        <name>BatchJobs</name>
        <message>
            <source>Switchyard was closed before the job started.</source>
            <translation>Switchyard se cerró antes de que empezara la tarea.</translation>
        </message>
        <message>
            <source>Switchyard was closed while the job ran; no answered row is lost.</source>
            <translation>Switchyard se cerró durante la tarea; no se ha perdido ninguna fila respondida.</translation>
        </message>
        <message>
            <source>The engine was needed for something else, such as another model; no answered row is lost.</source>
            <translation>El motor se necesitó para otra cosa, como otro modelo; no se ha perdido ninguna fila respondida.</translation>
        </message>
        <message>
            <source>The list of jobs could not be saved ({0}).</source>
            <translation>No se pudo guardar la lista de tareas ({0}).</translation>
        </message>
    </context>
    <context>
        <name>BatchPage</name>
        <message>
            <source>Batch</source>
            <translation>Lotes</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>Your chat's prompt is ready: choose the file whose rows it is to be asked of.</source>
            <translation>El prompt de su chat está listo: elija el archivo a cuyas filas se aplicará.</translation>
        </message>
        <message>
            <source>{0} has an unsupported file type: use txt, md, csv, tsv, jsonl, parquet, xlsx, pdf, docx or html, or a folder of such files.</source>
            <translation>{0} es de un tipo no admitido: use txt, md, csv, tsv, jsonl, parquet, xlsx, pdf, docx o html, o una carpeta con esos archivos.</translation>
        </message>
        <message numerus="yes">
            <source>{0} more after this one</source>
            <translation>
                <numerusform>{0} archivo más después de este</numerusform>
                <numerusform>{0} archivos más después de este</numerusform>
            </translation>
        </message>
        <message>
            <source>Another job is writing {0}: choose another result file.</source>
            <translation>Otra tarea está escribiendo {0}: elija otro archivo de resultado.</translation>
        </message>
        <message>
            <source>{0} already exists.</source>
            <translation>{0} ya existe.</translation>
        </message>
        <message>
            <source>Replacing it deletes the answers in it. To keep them, choose another name.</source>
            <translation>Al reemplazarlo se eliminan las respuestas que contiene. Para conservarlas, elija otro nombre.</translation>
        </message>
        <message>
            <source>Replace it</source>
            <translation>Reemplazar</translation>
        </message>
        <message>
            <source>Back</source>
            <translation>Atrás</translation>
        </message>
        <message>
            <source>Pause the job before you remove it from the list.</source>
            <translation>Pause la tarea antes de quitarla de la lista.</translation>
        </message>
        <message>
            <source>{0} was removed from the list; its result file stays.</source>
            <translation>{0} se quitó de la lista; su archivo de resultado permanece.</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Deshacer</translation>
        </message>
        <message>
            <source>Start this job over?</source>
            <translation>¿Empezar esta tarea de nuevo?</translation>
        </message>
        <message>
            <source>Its answers are deleted, and its result file is replaced when it is done.</source>
            <translation>Sus respuestas se eliminan y su archivo de resultado se reemplaza cuando termine.</translation>
        </message>
        <message>
            <source>Start over</source>
            <translation>Empezar de nuevo</translation>
        </message>
        <message>
            <source>1 row was</source>
            <translation>1 fila fue</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows were</source>
            <translation>
                <numerusform>{0} fila fue</numerusform>
                <numerusform>{0} filas fueron</numerusform>
            </translation>
        </message>
        <message>
            <source>This job began with {0}; now {1} is loaded.</source>
            <translation>Esta tarea empezó con {0}; ahora está cargado {1}.</translation>
        </message>
        <message>
            <source>{0} answered with the first. Load it to resume; chats then use it too. Starting over deletes those answers.</source>
            <translation>{0} respondidas con el primero. Cárguelo para reanudar; los chats también lo usarán. Empezar de nuevo elimina esas respuestas.</translation>
        </message>
        <message>
            <source>Load it and resume</source>
            <translation>Cargarlo y reanudar</translation>
        </message>
        <message>
            <source>{0} does not exist yet: it is written when the job is done, paused or stopped.</source>
            <translation>{0} todavía no existe: se escribe cuando la tarea está lista, en pausa o detenida.</translation>
        </message>
        <message>
            <source>Choose a file of prompts</source>
            <translation>Elegir un archivo de prompts</translation>
        </message>
        <message>
            <source>Folder of prompts</source>
            <translation>Carpeta de prompts</translation>
        </message>
    </context>
    <context>
        <name>Cache</name>
        <message>
            <source>random</source>
            <translation>aleatoria</translation>
        </message>
        <message>
            <source>static popularity</source>
            <translation>popularidad fija</translation>
        </message>
        <message>
            <source>Evicts the least recently used expert.</source>
            <translation>Expulsa el experto usado hace más tiempo.</translation>
        </message>
        <message>
            <source>Evicts the least frequently used expert.</source>
            <translation>Expulsa el experto usado con menos frecuencia.</translation>
        </message>
        <message>
            <source>Evicts an expert that is used rarely and not recently.</source>
            <translation>Expulsa un experto usado pocas veces y no recientemente.</translation>
        </message>
        <message>
            <source>Evicts the oldest expert.</source>
            <translation>Expulsa el experto más antiguo.</translation>
        </message>
        <message>
            <source>Evicts a random expert.</source>
            <translation>Expulsa un experto al azar.</translation>
        </message>
        <message>
            <source>Keeps the most popular experts.</source>
            <translation>Conserva los expertos más populares.</translation>
        </message>
        <message>
            <source>previous token</source>
            <translation>token anterior</translation>
        </message>
        <message>
            <source>next layer's gate</source>
            <translation>puerta de la capa siguiente</translation>
        </message>
        <message>
            <source>correlation table</source>
            <translation>tabla de correlación</translation>
        </message>
        <message>
            <source>trained network</source>
            <translation>red entrenada</translation>
        </message>
    </context>
    <context>
        <name>CacheCard</name>
        <message>
            <source>Cache</source>
            <translation>Caché</translation>
        </message>
        <message>
            <source>Expert cache</source>
            <translation>Caché de expertos</translation>
        </message>
        <message>
            <source>The cache keeps the most used experts where they can be reached fastest. A hit is an expert that was already there when it was needed; a miss has to be copied from slower memory first, or computed there.</source>
            <translation>La caché guarda los expertos más usados donde se accede a ellos más rápido. Un acierto es un experto que ya estaba allí cuando se necesitó; en un fallo, primero hay que copiarlo de una memoria más lenta o calcularlo allí.</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Show this tier's size</source>
            <translation>Mostrar el tamaño de este nivel</translation>
        </message>
        <message>
            <source>nothing to cache</source>
            <translation>nada que guardar en caché</translation>
        </message>
        <message>
            <source>policy {0}, adopted</source>
            <translation>política {0}, adoptada</translation>
        </message>
        <message>
            <source>policy {0}</source>
            <translation>política {0}</translation>
        </message>
        <message>
            <source>Chosen while running, by each policy's hit rate</source>
            <translation>Elegida en marcha, según la tasa de aciertos de cada política</translation>
        </message>
        <message>
            <source>Here a miss costs no more than a hit, so another size would not be faster.</source>
            <translation>Aquí un fallo no cuesta más que un acierto, así que otro tamaño no sería más rápido.</translation>
        </message>
        <message>
            <source>Load a model with experts to see its hit rate and the effect of other cache sizes.</source>
            <translation>Cargue un modelo con expertos para ver su tasa de aciertos y el efecto de otros tamaños de caché.</translation>
        </message>
        <message>
            <source>All experts are in the graphics card's memory: every one is a hit, and nothing is cached.</source>
            <translation>Todos los expertos están en la memoria de la tarjeta gráfica: cada uno es un acierto y no se guarda nada en caché.</translation>
        </message>
        <message>
            <source>All experts are in RAM and computed by the CPU, so there is nothing to cache.</source>
            <translation>Todos los expertos están en la RAM y los calcula la CPU, así que no hay nada que guardar en caché.</translation>
        </message>
        <message>
            <source>This model has no experts, so there is nothing to cache.</source>
            <translation>Este modelo no tiene expertos, así que no hay nada que guardar en caché.</translation>
        </message>
    </context>
    <context>
        <name>CallRow</name>
        <message>
            <source>The model wants to call {0}.</source>
            <translation>El modelo quiere llamar a {0}.</translation>
        </message>
        <message>
            <source>The model wants to call {0} of the server {1}.</source>
            <translation>El modelo quiere llamar a {0} del servidor {1}.</translation>
        </message>
        <message>
            <source>Allow once</source>
            <translation>Permitir una vez</translation>
        </message>
        <message>
            <source>Allow in this chat</source>
            <translation>Permitir en este chat</translation>
        </message>
        <message>
            <source>Always allow</source>
            <translation>Permitir siempre</translation>
        </message>
        <message>
            <source>Deny</source>
            <translation>Denegar</translation>
        </message>
        <message>
            <source>Fold the call</source>
            <translation>Contraer la llamada</translation>
        </message>
        <message>
            <source>Show arguments and result</source>
            <translation>Mostrar argumentos y resultado</translation>
        </message>
        <message>
            <source>unfolded</source>
            <translation>desplegado</translation>
        </message>
        <message>
            <source>folded</source>
            <translation>contraído</translation>
        </message>
        <message>
            <source>Arguments</source>
            <translation>Argumentos</translation>
        </message>
        <message>
            <source>Result</source>
            <translation>Resultado</translation>
        </message>
    </context>
    <context>
        <name>Catalogue</name>
        <message>
            <source>Strong at reasoning, mathematics and code, with very long documents; for machines with a lot of memory.</source>
            <translation>Fuerte en razonamiento, matemáticas y código, con documentos muy largos; para máquinas con mucha memoria.</translation>
        </message>
        <message>
            <source>English, Chinese and many others</source>
            <translation>Inglés, chino y muchos otros</translation>
        </message>
        <message>
            <source>Reasons step by step before it answers: good at mathematics, code and using tools.</source>
            <translation>Razona paso a paso antes de responder: bueno en matemáticas, código y uso de herramientas.</translation>
        </message>
        <message>
            <source>English, and others less well</source>
            <translation>Inglés; otros, menos bien</translation>
        </message>
        <message>
            <source>The strongest all-round model for machines with 96 GB or more: knowledge, code and long documents.</source>
            <translation>El modelo generalista más potente para máquinas de 96 GB o más: conocimientos, código y documentos largos.</translation>
        </message>
        <message>
            <source>over 100 languages</source>
            <translation>más de 100 idiomas</translation>
        </message>
        <message>
            <source>Even-tempered chat, writing and code in European languages, with long documents.</source>
            <translation>Chat equilibrado, redacción y código en lenguas europeas, con documentos largos.</translation>
        </message>
        <message>
            <source>English, French, German, Spanish, Italian and others</source>
            <translation>Inglés, francés, alemán, español, italiano y otros</translation>
        </message>
        <message>
            <source>Good at writing code over many steps and at using tools; can think before it answers.</source>
            <translation>Bueno para escribir código en muchos pasos y usar herramientas; puede pensar antes de responder.</translation>
        </message>
        <message>
            <source>English and Chinese</source>
            <translation>Inglés y chino</translation>
        </message>
        <message>
            <source>Much knowledge for its speed; answers directly, and keeps its pace with very long texts.</source>
            <translation>Muchos conocimientos para su velocidad; responde directamente y mantiene el ritmo con textos muy largos.</translation>
        </message>
        <message>
            <source>The best all-round choice for PCs with 32 GB: chat, code, reasoning and long documents.</source>
            <translation>La mejor opción generalista para PC de 32 GB: chat, código, razonamiento y documentos largos.</translation>
        </message>
        <message>
            <source>Natural writing in very many languages, general knowledge and summaries.</source>
            <translation>Redacción natural en muchísimos idiomas, cultura general y resúmenes.</translation>
        </message>
        <message>
            <source>over 140 languages</source>
            <translation>más de 140 idiomas</translation>
        </message>
        <message>
            <source>Reasons before it answers; good at mathematics, science and following instructions exactly.</source>
            <translation>Razona antes de responder; bueno en matemáticas, ciencia y en seguir instrucciones con exactitud.</translation>
        </message>
        <message>
            <source>English, and five others less well</source>
            <translation>Inglés; otros cinco, menos bien</translation>
        </message>
        <message>
            <source>Writes code over many steps and uses tools well for its size.</source>
            <translation>Escribe código en muchos pasos y usa bien las herramientas para su tamaño.</translation>
        </message>
        <message>
            <source>Reasons step by step and is quick: good at mathematics and code on PCs with 16 GB.</source>
            <translation>Razona paso a paso y es rápido: bueno en matemáticas y código en PC de 16 GB.</translation>
        </message>
        <message>
            <source>Made for programming: writes, explains and changes code in many languages.</source>
            <translation>Hecho para programar: escribe, explica y modifica código en muchos lenguajes.</translation>
        </message>
        <message>
            <source>A quick all-rounder that answers directly: chat, translation, summaries.</source>
            <translation>Un generalista rápido que responde directamente: chat, traducción, resúmenes.</translation>
        </message>
        <message>
            <source>Careful writing in European languages; uses every weight for every token, so it wants a large graphics card.</source>
            <translation>Redacción cuidada en lenguas europeas; usa todos los pesos en cada token, así que necesita una tarjeta gráfica grande.</translation>
        </message>
        <message>
            <source>Follows instructions and fills in forms and JSON reliably; little memory for long texts.</source>
            <translation>Sigue instrucciones y rellena formularios y JSON con fiabilidad; retiene poco de los textos largos.</translation>
        </message>
        <message>
            <source>English, German, Spanish, French, Japanese and seven others</source>
            <translation>Inglés, alemán, español, francés, japonés y siete más</translation>
        </message>
        <message>
            <source>General knowledge and writing in Chinese and English at good speed.</source>
            <translation>Cultura general y redacción en chino e inglés a buena velocidad.</translation>
        </message>
        <message>
            <source>Chinese and English</source>
            <translation>Chino e inglés</translation>
        </message>
        <message>
            <source>Pleasant writing in many languages; for graphics cards with 12 GB.</source>
            <translation>Redacción agradable en muchos idiomas; para tarjetas gráficas de 12 GB.</translation>
        </message>
        <message>
            <source>A solid small model that can think before it answers; for graphics cards with 8 GB.</source>
            <translation>Un modelo pequeño y sólido que puede pensar antes de responder; para tarjetas gráficas de 8 GB.</translation>
        </message>
        <message>
            <source>An older model, known from many papers: good for comparisons.</source>
            <translation>Un modelo más antiguo, conocido por muchos artículos: bueno para comparar.</translation>
        </message>
        <message>
            <source>English, French, German, Spanish, Italian</source>
            <translation>Inglés, francés, alemán, español, italiano</translation>
        </message>
        <message>
            <source>Reasoning and mathematics from textbook-like training; an older model.</source>
            <translation>Razonamiento y matemáticas de un entrenamiento tipo libro de texto; un modelo más antiguo.</translation>
        </message>
        <message>
            <source>English and 22 others</source>
            <translation>Inglés y otros 22</translation>
        </message>
        <message>
            <source>Very quick even without a graphics card: summaries, extraction, simple chat.</source>
            <translation>Muy rápido incluso sin tarjeta gráfica: resúmenes, extracción, chat sencillo.</translation>
        </message>
        <message>
            <source>English, Chinese, German, Spanish, French, Japanese and others</source>
            <translation>Inglés, chino, alemán, español, francés, japonés y otros</translation>
        </message>
        <message>
            <source>Small and quick: forms, JSON, summaries and tools on old laptops.</source>
            <translation>Pequeño y rápido: formularios, JSON, resúmenes y herramientas en portátiles antiguos.</translation>
        </message>
        <message>
            <source>Surprisingly able for its size; for small graphics cards and long texts.</source>
            <translation>Sorprendentemente capaz para su tamaño; para tarjetas gráficas pequeñas y textos largos.</translation>
        </message>
        <message>
            <source>Small, with a good sense for numbers and instructions.</source>
            <translation>Pequeño, con buen sentido de los números y las instrucciones.</translation>
        </message>
        <message>
            <source>Small and open in every respect: weights, data and recipe.</source>
            <translation>Pequeño y abierto en todos los aspectos: pesos, datos y receta.</translation>
        </message>
        <message>
            <source>English, French, Spanish, German, Italian, Portuguese</source>
            <translation>Inglés, francés, español, alemán, italiano, portugués</translation>
        </message>
        <message>
            <source>Open in every respect, and very quick; short texts only.</source>
            <translation>Abierto en todos los aspectos y muy rápido; solo textos cortos.</translation>
        </message>
        <message>
            <source>English</source>
            <translation>Inglés</translation>
        </message>
    </context>
    <context>
        <name>Chat</name>
        <message>
            <source>The model wrote no summary: leave the oldest turns out, or try another model.</source>
            <translation>El modelo no escribió ningún resumen: omita los mensajes más antiguos o pruebe con otro modelo.</translation>
        </message>
        <message>
            <source>Attach a folder</source>
            <translation>Adjuntar una carpeta</translation>
        </message>
        <message>
            <source>Pictures ({0})</source>
            <translation>Imágenes ({0})</translation>
        </message>
        <message>
            <source>All files (*)</source>
            <translation>Todos los archivos (*)</translation>
        </message>
        <message>
            <source>Attach files</source>
            <translation>Adjuntar archivos</translation>
        </message>
        <message>
            <source>Markdown and JSON of every chat (*.zip)</source>
            <translation>Markdown y JSON de todos los chats (*.zip)</translation>
        </message>
        <message>
            <source>Markdown, as shown (*.md)</source>
            <translation>Markdown, como se muestra (*.md)</translation>
        </message>
        <message>
            <source>PDF, as shown (*.pdf)</source>
            <translation>PDF, como se muestra (*.pdf)</translation>
        </message>
        <message>
            <source>Web page, as shown (*.html)</source>
            <translation>Página web, como se muestra (*.html)</translation>
        </message>
        <message>
            <source>JSON, with all versions and branches (*.json)</source>
            <translation>JSON, con todas las versiones y ramas (*.json)</translation>
        </message>
        <message>
            <source>Switchyard chats</source>
            <translation>Chats de Switchyard</translation>
        </message>
        <message>
            <source>Export</source>
            <translation>Exportar</translation>
        </message>
        <message>
            <source>Chats of Switchyard, ChatGPT and LM Studio (*.zip *.json *.md *.markdown)</source>
            <translation>Chats de Switchyard, ChatGPT y LM Studio (*.zip *.json *.md *.markdown)</translation>
        </message>
        <message>
            <source>Import chats</source>
            <translation>Importar chats</translation>
        </message>
        <message>
            <source>The import was cancelled; what was imported until then stays.</source>
            <translation>Se canceló la importación; lo importado hasta entonces permanece.</translation>
        </message>
        <message>
            <source>1 chat</source>
            <translation>1 chat</translation>
        </message>
        <message numerus="yes">
            <source>{0} chats</source>
            <translation>
                <numerusform>{0} chat</numerusform>
                <numerusform>{0} chats</numerusform>
            </translation>
        </message>
        <message>
            <source>1 that was here has new messages.</source>
            <translation>1 que ya estaba aquí tiene mensajes nuevos.</translation>
        </message>
        <message numerus="yes">
            <source>{0} that were here have new messages.</source>
            <translation>
                <numerusform>{0} que ya estaba aquí tiene mensajes nuevos.</numerusform>
                <numerusform>{0} que ya estaban aquí tienen mensajes nuevos.</numerusform>
            </translation>
        </message>
        <message>
            <source>1 was already here and is unchanged.</source>
            <translation>1 ya estaba aquí y sigue igual.</translation>
        </message>
        <message numerus="yes">
            <source>{0} were already here and are unchanged.</source>
            <translation>
                <numerusform>{0} ya estaba aquí y sigue igual.</numerusform>
                <numerusform>{0} ya estaban aquí y siguen igual.</numerusform>
            </translation>
        </message>
        <message>
            <source>1 chat is damaged and could not be read.</source>
            <translation>1 chat está dañado y no se pudo leer.</translation>
        </message>
        <message numerus="yes">
            <source>{0} chats are damaged and could not be read.</source>
            <translation>
                <numerusform>{0} chat está dañado y no se pudo leer.</numerusform>
                <numerusform>{0} chats están dañados y no se pudieron leer.</numerusform>
            </translation>
        </message>
        <message>
            <source>The file ends in the middle: what comes after that is not in it.</source>
            <translation>El archivo termina a la mitad: lo que seguiría no está en él.</translation>
        </message>
        <message>
            <source>Left out: {0}.</source>
            <translation>Omitido: {0}.</translation>
        </message>
        <message>
            <source>{0} was not imported: {1}.</source>
            <translation>{0} no se importó: {1}.</translation>
        </message>
        <message numerus="yes">
            <source>Neither were {0} other files.</source>
            <translation>
                <numerusform>Tampoco {0} archivo más.</numerusform>
                <numerusform>Tampoco {0} archivos más.</numerusform>
            </translation>
        </message>
        <message>
            <source>Imported: {0}.</source>
            <translation>Importado: {0}.</translation>
        </message>
        <message>
            <source>tool calls ({0})</source>
            <translation>llamadas a herramientas ({0})</translation>
        </message>
        <message>
            <source>pictures ({0})</source>
            <translation>imágenes ({0})</translation>
        </message>
        <message>
            <source>attached files ({0})</source>
            <translation>archivos adjuntos ({0})</translation>
        </message>
        <message>
            <source>settings of single chats ({0})</source>
            <translation>ajustes de chats concretos ({0})</translation>
        </message>
        <message>
            <source>chats without messages ({0})</source>
            <translation>chats sin mensajes ({0})</translation>
        </message>
        <message>
            <source>parts of an unknown kind ({0})</source>
            <translation>partes de tipo desconocido ({0})</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>Chat nuevo</translation>
        </message>
        <message>
            <source>Scratch chat</source>
            <translation>Chat temporal</translation>
        </message>
        <message>
            <source>Scratch, not stored</source>
            <translation>Temporal, no se guarda</translation>
        </message>
        <message>
            <source>Folders</source>
            <translation>Carpetas</translation>
        </message>
        <message>
            <source>Pinned</source>
            <translation>Fijados</translation>
        </message>
        <message>
            <source>Today</source>
            <translation>Hoy</translation>
        </message>
        <message>
            <source>Yesterday</source>
            <translation>Ayer</translation>
        </message>
        <message>
            <source>Previous 7 days</source>
            <translation>Últimos 7 días</translation>
        </message>
        <message>
            <source>Older</source>
            <translation>Más antiguos</translation>
        </message>
        <message>
            <source>Found</source>
            <translation>Encontrados</translation>
        </message>
        <message>
            <source>Fold earlier turns</source>
            <translation>Resumir los mensajes anteriores</translation>
        </message>
        <message>
            <source>The model summarises them, and reads the summary instead.</source>
            <translation>El modelo los resume y lee el resumen en su lugar.</translation>
        </message>
        <message>
            <source>Leave out the oldest</source>
            <translation>Omitir los más antiguos</translation>
        </message>
        <message>
            <source>The model reads nothing of them; they are kept.</source>
            <translation>El modelo no lee nada de ellos; se conservan.</translation>
        </message>
        <message>
            <source>Ask in a new chat</source>
            <translation>Preguntar en un chat nuevo</translation>
        </message>
        <message>
            <source>Send anyway</source>
            <translation>Enviar de todos modos</translation>
        </message>
        <message>
            <source>Not now</source>
            <translation>Ahora no</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>The earlier turns were not folded: {0}</source>
            <translation>No se resumieron los mensajes anteriores: {0}</translation>
        </message>
        <message>
            <source>Delete its chat, too</source>
            <translation>Eliminar también su chat</translation>
        </message>
        <message numerus="yes">
            <source>Delete its {0} chats, too</source>
            <translation>
                <numerusform>Eliminar también su {0} chat</numerusform>
                <numerusform>Eliminar también sus {0} chats</numerusform>
            </translation>
        </message>
        <message>
            <source>Delete the folder “{0}”?</source>
            <translation>¿Eliminar la carpeta «{0}»?</translation>
        </message>
        <message>
            <source>Its chats can stay, outside of any folder. Either way you can undo it.</source>
            <translation>Sus chats pueden quedarse, fuera de toda carpeta. Ambas cosas se pueden deshacer.</translation>
        </message>
        <message>
            <source>Delete only the folder</source>
            <translation>Eliminar solo la carpeta</translation>
        </message>
        <message>
            <source>The folder “{0}” was deleted.</source>
            <translation>Se eliminó la carpeta «{0}».</translation>
        </message>
        <message>
            <source>New folder</source>
            <translation>Carpeta nueva</translation>
        </message>
        <message>
            <source>New folder {0}</source>
            <translation>Carpeta nueva {0}</translation>
        </message>
        <message>
            <source>The message was deleted.</source>
            <translation>Se eliminó el mensaje.</translation>
        </message>
        <message>
            <source>The message was changed.</source>
            <translation>Se modificó el mensaje.</translation>
        </message>
        <message>
            <source>Earlier turns are folded into a summary.</source>
            <translation>Los mensajes anteriores están resumidos.</translation>
        </message>
        <message>
            <source>The oldest turns are left out of what the model reads.</source>
            <translation>El modelo ya no lee los mensajes más antiguos.</translation>
        </message>
        <message>
            <source>The turns are sent as they are again.</source>
            <translation>Los mensajes se envían de nuevo tal como son.</translation>
        </message>
        <message>
            <source>The summary was changed.</source>
            <translation>Se modificó el resumen.</translation>
        </message>
        <message>
            <source>An answer is being written here: wait for it, or stop it first.</source>
            <translation>Aquí se está escribiendo una respuesta: espérela o deténgala primero.</translation>
        </message>
        <message>
            <source>waiting for the engine, which is not running</source>
            <translation>esperando al motor, que no está en marcha</translation>
        </message>
        <message>
            <source>waiting for a model: none is loaded</source>
            <translation>esperando un modelo: no hay ninguno cargado</translation>
        </message>
        <message>
            <source>waiting for the model to load</source>
            <translation>esperando a que se cargue el modelo</translation>
        </message>
        <message>
            <source>searching the documents</source>
            <translation>consultando los documentos</translation>
        </message>
        <message>
            <source>starting the servers with the tools</source>
            <translation>iniciando los servidores de herramientas</translation>
        </message>
        <message>
            <source>waiting for you to allow a call</source>
            <translation>esperando su permiso para una llamada</translation>
        </message>
        <message>
            <source>waiting for a tool</source>
            <translation>esperando una herramienta</translation>
        </message>
        <message>
            <source>waiting for another answer</source>
            <translation>esperando otra respuesta</translation>
        </message>
        <message>
            <source>waiting for the first token from the other server</source>
            <translation>esperando el primer token del otro servidor</translation>
        </message>
        <message>
            <source>reading the prompt</source>
            <translation>leyendo el prompt</translation>
        </message>
        <message>
            <source>thinking</source>
            <translation>pensando</translation>
        </message>
        <message>
            <source>writing</source>
            <translation>escribiendo</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>first token {0} s</source>
            <translation>primer token a los {0} s</translation>
        </message>
        <message>
            <source>1 token</source>
            <translation>1 token</translation>
        </message>
        <message numerus="yes">
            <source>{0} tokens</source>
            <translation>
                <numerusform>{0} token</numerusform>
                <numerusform>{0} tokens</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} of {1} drafted tokens accepted</source>
            <translation>{0} de {1} tokens propuestos, aceptados</translation>
        </message>
        <message>
            <source>reached the limit</source>
            <translation>llegó al límite</translation>
        </message>
        <message>
            <source>the context is full</source>
            <translation>el contexto está lleno</translation>
        </message>
        <message>
            <source>edited</source>
            <translation>editado</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>detenida</translation>
        </message>
        <message>
            <source>picture read before</source>
            <translation>imagen ya leída</translation>
        </message>
        <message>
            <source>picture read in {0} s</source>
            <translation>imagen leída en {0} s</translation>
        </message>
        <message>
            <source>{0} pictures read in {1} s</source>
            <translation>{0} imágenes leídas en {1} s</translation>
        </message>
        <message>
            <source>{0} pictures read before</source>
            <translation>{0} imágenes ya leídas</translation>
        </message>
        <message>
            <source>{0} of {1} pictures read before, the others in {2} s</source>
            <translation>{0} de {1} imágenes ya leídas, las demás en {2} s</translation>
        </message>
        <message>
            <source>Thinking… {0}</source>
            <translation>Pensando… {0}</translation>
        </message>
        <message>
            <source>Thought</source>
            <translation>Razonamiento</translation>
        </message>
        <message>
            <source>Thought for {0}</source>
            <translation>Pensó {0}</translation>
        </message>
        <message>
            <source>The answer is incomplete.</source>
            <translation>La respuesta está incompleta.</translation>
        </message>
        <message>
            <source>The text so far is kept.</source>
            <translation>El texto escrito hasta ahora se conserva.</translation>
        </message>
        <message>
            <source>Your message is kept: make room, edit it, or start a new chat.</source>
            <translation>Su mensaje se conserva: haga sitio, edítelo o empiece un chat nuevo.</translation>
        </message>
        <message>
            <source>The context was full before the answer began: make room, and ask again.</source>
            <translation>El contexto estaba lleno antes de que empezara la respuesta: haga sitio y pregunte de nuevo.</translation>
        </message>
        <message>
            <source>It was still thinking when it reached the limit: raise Max tokens, or let it think less.</source>
            <translation>El modelo seguía pensando al llegar al límite: aumente «Tokens máx.» o deje que piense menos.</translation>
        </message>
        <message>
            <source>The answer ran into the end of the context: make room, and let it continue.</source>
            <translation>La respuesta llegó al final del contexto: haga sitio y deje que continúe.</translation>
        </message>
        <message>
            <source>{0} tokens of context</source>
            <translation>{0} tokens de contexto</translation>
        </message>
        <message>
            <source>for new chats</source>
            <translation>para chats nuevos</translation>
        </message>
        <message>
            <source>sees pictures</source>
            <translation>ve imágenes</translation>
        </message>
        <message>
            <source>default</source>
            <translation>predeterminado</translation>
        </message>
        <message>
            <source>loaded</source>
            <translation>cargado</translation>
        </message>
        <message>
            <source>measured</source>
            <translation>medido</translation>
        </message>
        <message>
            <source>predicted</source>
            <translation>previsto</translation>
        </message>
        <message>
            <source>The only model there</source>
            <translation>El único modelo allí</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Modelo inicial</translation>
        </message>
        <message>
            <source>Sent to {0}, another program on this PC</source>
            <translation>Se envía a {0}, otro programa de este PC</translation>
        </message>
        <message>
            <source>Sent to {0}</source>
            <translation>Se envía a {0}</translation>
        </message>
        <message>
            <source>{0}: what you write in this chat stays on this PC.</source>
            <translation>{0}: lo que escribe en este chat se queda en este PC.</translation>
        </message>
        <message>
            <source>{0}: what you write in this chat leaves this PC.</source>
            <translation>{0}: lo que escribe en este chat sale de este PC.</translation>
        </message>
        <message>
            <source>top-k</source>
            <translation>top-k</translation>
        </message>
        <message>
            <source>min-p</source>
            <translation>min-p</translation>
        </message>
        <message>
            <source>the repetition penalty</source>
            <translation>la penalización por repetición</translation>
        </message>
        <message>
            <source>loop guard</source>
            <translation>antibucles</translation>
        </message>
        <message>
            <source>beam search</source>
            <translation>la búsqueda por haz</translation>
        </message>
        <message>
            <source>how much to think</source>
            <translation>cuánto pensar</translation>
        </message>
        <message>
            <source>It does not take this chat's {0}.</source>
            <translation>No se tiene en cuenta de este chat: {0}.</translation>
        </message>
        <message>
            <source>{0} of {1} reads text only: choose another model to send pictures.</source>
            <translation>{0} de {1} solo lee texto: elija otro modelo para enviar imágenes.</translation>
        </message>
        <message>
            <source>The model</source>
            <translation>El modelo</translation>
        </message>
        <message>
            <source>{0} reads text only.</source>
            <translation>{0} solo lee texto.</translation>
        </message>
        <message>
            <source>No model on this PC sees pictures.</source>
            <translation>Ningún modelo de este PC ve imágenes.</translation>
        </message>
        <message>
            <source>{0} and {1} more</source>
            <translation>{0} y {1} más</translation>
        </message>
        <message>
            <source>On this PC these see pictures: {0}.</source>
            <translation>En este PC ven imágenes: {0}.</translation>
        </message>
        <message>
            <source>Your message has about {0} tokens; the model reads {1}. Shorten it.</source>
            <translation>Su mensaje tiene unos {0} tokens; el modelo lee {1}. Acórtelo.</translation>
        </message>
        <message>
            <source>With your message this chat has about {0} tokens; the model reads {1}. Make room, or ask in a new chat.</source>
            <translation>Con su mensaje, este chat tiene unos {0} tokens; el modelo lee {1}. Haga sitio o pregunte en un chat nuevo.</translation>
        </message>
        <message>
            <source>With your message this chat has about {0} tokens; the model reads {1}. Ask in a new chat.</source>
            <translation>Con su mensaje, este chat tiene unos {0} tokens; el modelo lee {1}. Pregunte en un chat nuevo.</translation>
        </message>
        <message>
            <source>This chat takes {0} of the {1} tokens the model reads. Make room before it is full.</source>
            <translation>Este chat ocupa {0} de los {1} tokens que lee el modelo. Haga sitio antes de que se llene.</translation>
        </message>
        <message>
            <source>The context is full: {0} of {1} tokens are taken. Make room, or ask in a new chat.</source>
            <translation>El contexto está lleno: {0} de {1} tokens ocupados. Haga sitio o pregunte en un chat nuevo.</translation>
        </message>
        <message>
            <source>The earlier turns are summarised once the model is idle.</source>
            <translation>Los mensajes anteriores se resumirán cuando el modelo esté libre.</translation>
        </message>
        <message>
            <source>Summarising the earlier turns… {0}. Your messages come first.</source>
            <translation>Resumiendo los mensajes anteriores… {0}. Los suyos tienen prioridad.</translation>
        </message>
        <message>
            <source>Reading… {0}</source>
            <translation>Leyendo… {0}</translation>
        </message>
        <message>
            <source>Reading…</source>
            <translation>Leyendo…</translation>
        </message>
        <message>
            <source>folder</source>
            <translation>Carpeta</translation>
        </message>
        <message>
            <source>file</source>
            <translation>Archivo</translation>
        </message>
        <message>
            <source>This {0} {1}.</source>
            <translation>{0}: {1}.</translation>
        </message>
        <message>
            <source>Not read yet</source>
            <translation>Aún no leído</translation>
        </message>
        <message>
            <source>1 file</source>
            <translation>1 archivo</translation>
        </message>
        <message numerus="yes">
            <source>{0} files</source>
            <translation>
                <numerusform>{0} archivo</numerusform>
                <numerusform>{0} archivos</numerusform>
            </translation>
        </message>
        <message>
            <source>1 page</source>
            <translation>1 página</translation>
        </message>
        <message numerus="yes">
            <source>{0} pages</source>
            <translation>
                <numerusform>{0} página</numerusform>
                <numerusform>{0} páginas</numerusform>
            </translation>
        </message>
        <message>
            <source>about {0} tokens</source>
            <translation>unos {0} tokens</translation>
        </message>
        <message>
            <source>goes to {0}</source>
            <translation>va a {0}</translation>
        </message>
        <message>
            <source>page {0}</source>
            <translation>página {0}</translation>
        </message>
        <message>
            <source>There was no room for {0} beside this chat: ask in a new chat, or shorten this one.</source>
            <translation>No había sitio para {0} junto a este chat: pregunte en un chat nuevo o acorte este.</translation>
        </message>
        <message>
            <source>The documents could not be searched ({0}), so the answer is given without them.</source>
            <translation>No se pudieron consultar los documentos ({0}): la respuesta se da sin ellos.</translation>
        </message>
        <message>
            <source>It reads text only: the pictures in this chat are not sent.</source>
            <translation>Solo lee texto: las imágenes de este chat no se envían.</translation>
        </message>
        <message>
            <source>This model reads text only: the pictures in this chat are not read.</source>
            <translation>Este modelo solo lee texto: las imágenes de este chat no se leen.</translation>
        </message>
        <message>
            <source>The server {0} is no longer in the list, and nothing else answers here: choose a model for this chat.</source>
            <translation>El servidor {0} ya no está en la lista y nada más responde aquí: elija un modelo para este chat.</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 hilo</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} hilo</numerusform>
                <numerusform>{0} hilos</numerusform>
            </translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>Chat</source>
            <translation>Chat</translation>
        </message>
        <message>
            <source>Please continue.</source>
            <translation>Continúa, por favor.</translation>
        </message>
        <message>
            <source>Branch: {0}</source>
            <translation>Rama: {0}</translation>
        </message>
        <message>
            <source>Picture</source>
            <translation>Imagen</translation>
        </message>
        <message>
            <source>Custom</source>
            <translation>Personalizado</translation>
        </message>
        <message>
            <source>Precise</source>
            <translation>Preciso</translation>
        </message>
        <message>
            <source>Balanced</source>
            <translation>Equilibrado</translation>
        </message>
        <message>
            <source>Creative</source>
            <translation>Creativo</translation>
        </message>
        <message>
            <source>{0} beams</source>
            <translation>{0} haces</translation>
        </message>
        <message>
            <source>always the likeliest token</source>
            <translation>siempre el token más probable</translation>
        </message>
        <message>
            <source>temperature {0}</source>
            <translation>temperatura {0}</translation>
        </message>
        <message>
            <source>top-k {0}</source>
            <translation>top-k {0}</translation>
        </message>
        <message>
            <source>top-p {0}</source>
            <translation>top-p {0}</translation>
        </message>
        <message>
            <source>min-p {0}</source>
            <translation>min-p {0}</translation>
        </message>
        <message>
            <source>repetition penalty {0}</source>
            <translation>penalización por repetición {0}</translation>
        </message>
        <message>
            <source>presence penalty {0}</source>
            <translation>penalización por presencia {0}</translation>
        </message>
        <message>
            <source>frequency penalty {0}</source>
            <translation>penalización por frecuencia {0}</translation>
        </message>
        <message>
            <source>loop guard {0}</source>
            <translation>antibucles {0}</translation>
        </message>
        <message>
            <source>thinking {0}</source>
            <translation>razonamiento: {0}</translation>
        </message>
    </context>
    <context>
        <name>ChatDocument</name>
        <message>
            <source>Chat</source>
            <translation>Chat</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>Prompt del sistema</translation>
        </message>
        <message>
            <source>nothing could be written there</source>
            <translation>no se pudo escribir nada ahí</translation>
        </message>
        <message>
            <source>Assistant</source>
            <translation>Asistente</translation>
        </message>
        <message>
            <source>You</source>
            <translation>Usted</translation>
        </message>
        <message>
            <source>Thoughts</source>
            <translation>Pensamientos</translation>
        </message>
        <message>
            <source>picture</source>
            <translation>imagen</translation>
        </message>
    </context>
    <context>
        <name>ChatFiles</name>
        <message>
            <source>The export was cancelled; no file was written.</source>
            <translation>Se canceló la exportación; no se escribió ningún archivo.</translation>
        </message>
        <message>
            <source>Chat</source>
            <translation>Chat</translation>
        </message>
    </context>
    <context>
        <name>ChatStore</name>
        <message>
            <source>The chats in {path} were written by a newer Switchyard and are not changed. Chats made now are lost when the window closes: update Switchyard first.</source>
            <translation>Los chats de {path} los escribió un Switchyard más reciente y no se modifican. Los que haga ahora se perderán al cerrar la ventana: actualice antes Switchyard.</translation>
        </message>
        <message>
            <source>{folder} is read-only, so you can read your chats but not save new ones: what you write now is lost when the window closes. Make the folder writable and restart Switchyard.</source>
            <translation>{folder} es de solo lectura: puede leer sus chats, pero no guardar otros nuevos. Lo que escriba ahora se perderá al cerrar la ventana. Permita escribir en la carpeta y reinicie Switchyard.</translation>
        </message>
        <message>
            <source>The chat database was damaged. Recovered chats: {conversations}, messages: {messages}; messages lost: {lost}. The damaged file is kept as {path}.</source>
            <translation>La base de datos de chats estaba dañada. Chats recuperados: {conversations}, mensajes: {messages}; mensajes perdidos: {lost}. El archivo dañado se conserva como {path}.</translation>
        </message>
        <message>
            <source>The chat database was damaged and has been repaired (chats: {conversations}, messages: {messages}); no message seems to be missing. The damaged file is kept as {path}.</source>
            <translation>La base de datos de chats estaba dañada y se ha reparado (chats: {conversations}, mensajes: {messages}); no parece faltar ningún mensaje. El archivo dañado se conserva como {path}.</translation>
        </message>
        <message>
            <source>The chat database was damaged and no message could be read from it. The damaged file is kept as {path}.</source>
            <translation>La base de datos de chats estaba dañada y no se pudo leer ningún mensaje. El archivo dañado se conserva como {path}.</translation>
        </message>
        <message>
            <source>The disk is full, so new text is not saved: free some space on the disk of {folder}.</source>
            <translation>El disco está lleno, así que el texto nuevo no se guarda: libere espacio en el disco de {folder}.</translation>
        </message>
        <message>
            <source>Another program is using the chats in {folder}, so new text is not saved: close it.</source>
            <translation>Otro programa usa los chats de {folder}, así que el texto nuevo no se guarda: ciérrelo.</translation>
        </message>
        <message>
            <source>Chats cannot be saved in {folder} ({why}): check that it can be written to.</source>
            <translation>No se pueden guardar chats en {folder} ({why}): compruebe que se pueda escribir ahí.</translation>
        </message>
        <message>
            <source>Switchyard closed during this answer.</source>
            <translation>Switchyard se cerró durante esta respuesta.</translation>
        </message>
    </context>
    <context>
        <name>ChatTransfer</name>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>Writing {0}…</source>
            <translation>Escribiendo {0}…</translation>
        </message>
        <message numerus="yes">
            <source>{0} files</source>
            <translation>
                <numerusform>{0} archivo</numerusform>
                <numerusform>{0} archivos</numerusform>
            </translation>
        </message>
        <message>
            <source>Importing {0}…</source>
            <translation>Importando {0}…</translation>
        </message>
        <message>
            <source>{0} {1}, {2} chats so far</source>
            <translation>{0} {1}, {2} chats hasta ahora</translation>
        </message>
        <message>
            <source>Written to {0}</source>
            <translation>Guardado en {0}</translation>
        </message>
    </context>
    <context>
        <name>ChatView</name>
        <message>
            <source>Dismiss</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>Keep this chat</source>
            <translation>Conservar este chat</translation>
        </message>
        <message>
            <source>Close for good</source>
            <translation>Cerrar definitivamente</translation>
        </message>
        <message>
            <source>The starter is a small demo model: it gets facts wrong and may repeat itself.</source>
            <translation>El modelo inicial es un pequeño modelo de demostración: se equivoca en los datos y a veces se repite.</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>Chat nuevo</translation>
        </message>
        <message>
            <source>Find in this chat</source>
            <translation>Buscar en este chat</translation>
        </message>
        <message>
            <source>Next match</source>
            <translation>Coincidencia siguiente</translation>
        </message>
        <message>
            <source>Previous match</source>
            <translation>Coincidencia anterior</translation>
        </message>
        <message>
            <source>New scratch chat, which is never stored</source>
            <translation>Nuevo chat temporal, que nunca se guarda</translation>
        </message>
        <message>
            <source>Search chats</source>
            <translation>Buscar chats</translation>
        </message>
        <message>
            <source>Choose the model</source>
            <translation>Elegir el modelo</translation>
        </message>
        <message>
            <source>Rename chat</source>
            <translation>Renombrar el chat</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>Detener la respuesta</translation>
        </message>
        <message>
            <source>Undo the last deletion or change of a chat</source>
            <translation>Deshacer la última eliminación o modificación de un chat</translation>
        </message>
        <message>
            <source>Previous chat</source>
            <translation>Chat anterior</translation>
        </message>
        <message>
            <source>Next chat</source>
            <translation>Chat siguiente</translation>
        </message>
        <message>
            <source>Attach files</source>
            <translation>Adjuntar archivos</translation>
        </message>
        <message>
            <source>Print the chat</source>
            <translation>Imprimir el chat</translation>
        </message>
        <message>
            <source>Ask two, side by side</source>
            <translation>Preguntar a dos, en paralelo</translation>
        </message>
        <message>
            <source>Write a message</source>
            <translation>Escribir un mensaje</translation>
        </message>
        <message>
            <source>Enter</source>
            <translation>Intro</translation>
        </message>
        <message>
            <source>Send</source>
            <translation>Enviar</translation>
        </message>
        <message>
            <source>Shift+Enter</source>
            <translation>Mayús+Intro</translation>
        </message>
        <message>
            <source>Start a new line</source>
            <translation>Empezar una línea nueva</translation>
        </message>
        <message>
            <source>The whole chat goes there, now and with each further message: your messages, their pictures and what is read of their documents, the answers and the system prompt. What happens with it is up to who runs that server.</source>
            <translation>Se envía allí todo el chat, ahora y con cada mensaje posterior: sus mensajes, las imágenes y lo que se lea de los documentos, las respuestas y el prompt del sistema. Lo que ocurra con ello depende de quien administre ese servidor.</translation>
        </message>
        <message>
            <source>The way there is not encrypted: others in the network can read it.</source>
            <translation>El trayecto no está cifrado: otras personas de la red pueden leerlo.</translation>
        </message>
        <message>
            <source>Send this chat to {0}?</source>
            <translation>¿Enviar este chat a {0}?</translation>
        </message>
        <message>
            <source>Send it there</source>
            <translation>Enviarlo</translation>
        </message>
        <message>
            <source>A scratch chat is never stored: to print it, keep it first.</source>
            <translation>Un chat temporal nunca se guarda: para imprimirlo, consérvelo primero.</translation>
        </message>
        <message>
            <source>Scratch chat: nothing of it is stored, and it is gone once it is closed.</source>
            <translation>Chat temporal: nada de él se guarda y desaparece al cerrarlo.</translation>
        </message>
        <message>
            <source>Undo  Ctrl+Z</source>
            <translation>Deshacer  Ctrl+Z</translation>
        </message>
        <message>
            <source>The scratch chat is gone.</source>
            <translation>El chat temporal ha desaparecido.</translation>
        </message>
        <message>
            <source>“{0}” was deleted.</source>
            <translation>Se eliminó «{0}».</translation>
        </message>
        <message>
            <source>The model is loading{0}. You can write now; the answer follows.</source>
            <translation>El modelo se está cargando{0}. Ya puede escribir; la respuesta llegará después.</translation>
        </message>
        <message>
            <source>No model is loaded. You can write now; the answer follows once one is loaded.</source>
            <translation>No hay ningún modelo cargado. Ya puede escribir; la respuesta llegará cuando lo haya.</translation>
        </message>
        <message>
            <source>{0} runs on this machine; nothing you write leaves it.</source>
            <translation>{0} se ejecuta en esta máquina; nada de lo que escriba sale de ella.</translation>
        </message>
    </context>
    <context>
        <name>Column</name>
        <message>
            <source>First</source>
            <translation>Primera</translation>
        </message>
        <message>
            <source>Second</source>
            <translation>Segunda</translation>
        </message>
        <message>
            <source>{0}: model</source>
            <translation>{0}: modelo</translation>
        </message>
        <message>
            <source>{0}: sampling</source>
            <translation>{0}: muestreo</translation>
        </message>
        <message>
            <source>{0} answer</source>
            <translation>{0} respuesta</translation>
        </message>
        <message>
            <source>Go on with this</source>
            <translation>Continuar con esta</translation>
        </message>
        <message>
            <source>Go on with the {0} answer</source>
            <translation>Continuar con esta respuesta: {0}</translation>
        </message>
    </context>
    <context>
        <name>Comparison</name>
        <message>
            <source>One model is open at a time on this PC: this answer comes second.</source>
            <translation>En este PC solo hay un modelo abierto a la vez: esta respuesta llega en segundo lugar.</translation>
        </message>
        <message>
            <source>The model is loading; its answer follows.</source>
            <translation>El modelo se está cargando; su respuesta llegará después.</translation>
        </message>
        <message>
            <source>The model was not loaded, so there is no answer from it.</source>
            <translation>El modelo no se cargó, así que no hay respuesta suya.</translation>
        </message>
    </context>
    <context>
        <name>Composer</name>
        <message>
            <source>Message Switchyard…</source>
            <translation>Mensaje para Switchyard…</translation>
        </message>
        <message>
            <source>Message</source>
            <translation>Mensaje</translation>
        </message>
        <message>
            <source>Enter sends, Shift+Enter starts a new line</source>
            <translation>Intro envía, Mayús+Intro empieza una línea nueva</translation>
        </message>
        <message>
            <source>Attach files or a folder</source>
            <translation>Adjuntar archivos o una carpeta</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>Prompt del sistema</translation>
        </message>
        <message>
            <source>Instructions the model reads first</source>
            <translation>Instrucciones que el modelo lee primero</translation>
        </message>
        <message>
            <source>The model may call tools in this chat</source>
            <translation>El modelo puede llamar a herramientas en este chat</translation>
        </message>
        <message>
            <source>Let the model call tools</source>
            <translation>Dejar que el modelo llame a herramientas</translation>
        </message>
        <message>
            <source>Sampling: {0}</source>
            <translation>Muestreo: {0}</translation>
        </message>
        <message>
            <source>How the next token is chosen: {0}</source>
            <translation>Cómo se elige el siguiente token: {0}</translation>
        </message>
        <message>
            <source>Files…</source>
            <translation>Archivos…</translation>
        </message>
        <message>
            <source>Folder…</source>
            <translation>Carpeta…</translation>
        </message>
        <message>
            <source>System</source>
            <translation>Sistema</translation>
        </message>
        <message>
            <source>Stop  Esc</source>
            <translation>Detener  Esc</translation>
        </message>
        <message>
            <source>Send</source>
            <translation>Enviar</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>Detener la respuesta</translation>
        </message>
    </context>
    <context>
        <name>ComputingCard</name>
        <message>
            <source>Time it</source>
            <translation>Medir</translation>
        </message>
        <message>
            <source>Loads the model with these settings, has it write a little, and measures that</source>
            <translation>Carga el modelo con estos ajustes, le hace escribir un poco y lo mide</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>Recargar modelo</translation>
        </message>
        <message>
            <source>Changes apply at the next start, or now with these buttons.</source>
            <translation>Los cambios se aplican en el próximo inicio, o ahora con estos botones.</translation>
        </message>
        <message>
            <source>Loading the model and timing it…</source>
            <translation>Cargando y midiendo el modelo…</translation>
        </message>
        <message>
            <source>{0}: {1} tokens/s, measured just now</source>
            <translation>{0}: {1} tokens/s, medido ahora mismo</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Modelo inicial</translation>
        </message>
        <message>
            <source>No graphics card computes here.</source>
            <translation>Aquí no calcula ninguna tarjeta gráfica.</translation>
        </message>
        <message>
            <source>{0}: {1} tokens/s, measured</source>
            <translation>{0}: {1} tokens/s, medido</translation>
        </message>
        <message>
            <source>{0}: about {1} tokens/s, {2} to {3}</source>
            <translation>{0}: unos {1} tokens/s, {2} a {3}</translation>
        </message>
    </context>
    <context>
        <name>ContextMeter</name>
        <message>
            <source>Context</source>
            <translation>Contexto</translation>
        </message>
        <message>
            <source>Estimate, including your draft; the engine counts with the next answer.</source>
            <translation>Estimación, con su borrador incluido; el motor cuenta con la próxima respuesta.</translation>
        </message>
        <message>
            <source>Counted by the engine after the last answer.</source>
            <translation>Contado por el motor tras la última respuesta.</translation>
        </message>
        <message>
            <source>Click to see and change the length.</source>
            <translation>Haga clic para ver y cambiar la longitud.</translation>
        </message>
        <message>
            <source>context {0} of {1}</source>
            <translation>contexto {0} de {1}</translation>
        </message>
        <message>
            <source>context about {0} of {1}</source>
            <translation>contexto aprox. {0} de {1}</translation>
        </message>
        <message>
            <source>context filling up: {0} of {1}</source>
            <translation>contexto llenándose: {0} de {1}</translation>
        </message>
        <message>
            <source>context filling up: about {0} of {1}</source>
            <translation>contexto llenándose: aprox. {0} de {1}</translation>
        </message>
        <message>
            <source>context almost full: {0} of {1}</source>
            <translation>contexto casi lleno: {0} de {1}</translation>
        </message>
        <message>
            <source>context almost full: about {0} of {1}</source>
            <translation>contexto casi lleno: aprox. {0} de {1}</translation>
        </message>
        <message>
            <source>context exceeded: {0} of {1}</source>
            <translation>contexto superado: {0} de {1}</translation>
        </message>
        <message>
            <source>context exceeded: about {0} of {1}</source>
            <translation>contexto superado: aprox. {0} de {1}</translation>
        </message>
    </context>
    <context>
        <name>ContextPopover</name>
        <message>
            <source>Context</source>
            <translation>Contexto</translation>
        </message>
        <message>
            <source>Length of the context, in steps</source>
            <translation>Longitud del contexto, por pasos</translation>
        </message>
        <message>
            <source> tokens</source>
            <translation> tokens</translation>
        </message>
        <message>
            <source>Length of the context</source>
            <translation>Longitud del contexto</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>Recargar modelo</translation>
        </message>
        <message>
            <source>Fold earlier turns into a summary</source>
            <translation>Resumir los mensajes anteriores</translation>
        </message>
        <message>
            <source>Leave out the oldest turns</source>
            <translation>Omitir los mensajes más antiguos</translation>
        </message>
        <message>
            <source>Length</source>
            <translation>Longitud</translation>
        </message>
        <message>
            <source>About {0} of {1} tokens are used ({2}).</source>
            <translation>Unos {0} de {1} tokens ocupados ({2}).</translation>
        </message>
        <message>
            <source>{0} of {1} tokens used ({2}).</source>
            <translation>{0} de {1} tokens ocupados ({2}).</translation>
        </message>
        <message>
            <source>There is no earlier answer to fold yet.</source>
            <translation>Aún no hay ninguna respuesta anterior que resumir.</translation>
        </message>
        <message>
            <source>The length is set by {0}.</source>
            <translation>La longitud la fija {0}.</translation>
        </message>
        <message>
            <source>Keys and values of {0} tokens take {1} of {2} ({3} each).</source>
            <translation>Las claves y valores de {0} tokens ocupan {1} de {2} ({3} cada uno).</translation>
        </message>
        <message>
            <source>That is more than is free now ({0}).</source>
            <translation>Es más de lo que hay libre ahora ({0}).</translation>
        </message>
        <message>
            <source>The model is loaded with {0} tokens: the change needs it loaded again.</source>
            <translation>El modelo está cargado con {0} tokens: para aplicar el cambio hay que cargarlo de nuevo.</translation>
        </message>
    </context>
    <context>
        <name>ConversationDelegate</name>
        <message>
            <source>New title</source>
            <translation>Título nuevo</translation>
        </message>
    </context>
    <context>
        <name>ConversationPanel</name>
        <message>
            <source>Search chats</source>
            <translation>Buscar chats</translation>
        </message>
        <message>
            <source>Folders, scratch chats, import and export</source>
            <translation>Carpetas, chats temporales, importar y exportar</translation>
        </message>
        <message>
            <source>More for chats</source>
            <translation>Más opciones de chats</translation>
        </message>
        <message>
            <source>Chats</source>
            <translation>Chats</translation>
        </message>
        <message>
            <source>No chat contains these words.</source>
            <translation>Ningún chat contiene estas palabras.</translation>
        </message>
        <message>
            <source>Rename	F2</source>
            <translation>Renombrar	F2</translation>
        </message>
        <message>
            <source>Close for good	Del</source>
            <translation>Cerrar definitivamente	Supr</translation>
        </message>
        <message>
            <source>Unpin</source>
            <translation>Desfijar</translation>
        </message>
        <message>
            <source>Pin to the top</source>
            <translation>Fijar arriba</translation>
        </message>
        <message>
            <source>Export…</source>
            <translation>Exportar…</translation>
        </message>
        <message>
            <source>Print…</source>
            <translation>Imprimir…</translation>
        </message>
        <message>
            <source>Delete	Del</source>
            <translation>Eliminar	Supr</translation>
        </message>
        <message>
            <source>Move to folder</source>
            <translation>Mover a carpeta</translation>
        </message>
        <message>
            <source>No folder</source>
            <translation>Sin carpeta</translation>
        </message>
        <message>
            <source>New folder…</source>
            <translation>Carpeta nueva…</translation>
        </message>
        <message>
            <source>Collapse</source>
            <translation>Contraer</translation>
        </message>
        <message>
            <source>Expand</source>
            <translation>Expandir</translation>
        </message>
        <message>
            <source>Delete…	Del</source>
            <translation>Eliminar…	Supr</translation>
        </message>
        <message>
            <source>New folder</source>
            <translation>Carpeta nueva</translation>
        </message>
        <message>
            <source>New scratch chat	Ctrl+Shift+N</source>
            <translation>Nuevo chat temporal	Ctrl+Mayús+N</translation>
        </message>
        <message>
            <source>Import chats…</source>
            <translation>Importar chats…</translation>
        </message>
        <message>
            <source>Export chat…</source>
            <translation>Exportar chat…</translation>
        </message>
        <message>
            <source>Print chat…</source>
            <translation>Imprimir chat…</translation>
        </message>
        <message>
            <source>Export all chats…</source>
            <translation>Exportar todos los chats…</translation>
        </message>
    </context>
    <context>
        <name>CopyButton</name>
        <message>
            <source>Copied</source>
            <translation>Copiado</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Copiar</translation>
        </message>
        <message>
            <source>Copy code</source>
            <translation>Copiar código</translation>
        </message>
    </context>
    <context>
        <name>CoreGrid</name>
        <message>
            <source>{0} CPUs, {1}% busy on average; busiest: number {2} with {3}%</source>
            <translation>{0} CPU, ocupadas al {1} % de media; la más ocupada: número {2} con {3} %</translation>
        </message>
        <message>
            <source>CPU {0}: {1}% busy</source>
            <translation>CPU {0}: ocupada al {1} %</translation>
        </message>
    </context>
    <context>
        <name>DataCard</name>
        <message>
            <source>Data</source>
            <translation>Datos</translation>
        </message>
        <message>
            <source>Open folder</source>
            <translation>Abrir carpeta</translation>
        </message>
        <message>
            <source>Change…</source>
            <translation>Cambiar…</translation>
        </message>
        <message>
            <source>Data folder</source>
            <translation>Carpeta de datos</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Deshacer</translation>
        </message>
        <message>
            <source>Folder for chats and models</source>
            <translation>Carpeta para chats y modelos</translation>
        </message>
        <message>
            <source>Copy your chats and models to {0}?</source>
            <translation>¿Copiar sus chats y modelos a {0}?</translation>
        </message>
        <message>
            <source>They are copied at the next start. The current folder stays until you delete it.</source>
            <translation>Se copian en el próximo inicio. La carpeta actual permanece hasta que la elimine.</translation>
        </message>
        <message>
            <source>Copy them</source>
            <translation>Copiarlos</translation>
        </message>
        <message>
            <source>Start empty</source>
            <translation>Empezar vacío</translation>
        </message>
        <message>
            <source>At the next start your chats and models are copied to {0}, which is then used.</source>
            <translation>En el próximo inicio, sus chats y modelos se copian a {0}, que se usará desde entonces.</translation>
        </message>
        <message>
            <source>The data in {0} is used from the next start.</source>
            <translation>Los datos de {0} se usan a partir del próximo inicio.</translation>
        </message>
    </context>
    <context>
        <name>DataFolder</name>
        <message>
            <source>{0} is inside the current data folder; choose a folder outside it.</source>
            <translation>{0} está dentro de la carpeta de datos actual; elija una carpeta fuera de ella.</translation>
        </message>
        <message>
            <source>{0} cannot be written to ({1}); choose another folder.</source>
            <translation>No se puede escribir en {0} ({1}); elija otra carpeta.</translation>
        </message>
        <message>
            <source>The data could not be copied to {0} ({1}); {2} stays in use.</source>
            <translation>No se pudieron copiar los datos a {0} ({1}); se sigue usando {2}.</translation>
        </message>
        <message>
            <source>{0} has {1} free, but {2} are to be copied; {3} stays in use.</source>
            <translation>{0} tiene {1} libres, pero hay que copiar {2}; se sigue usando {3}.</translation>
        </message>
    </context>
    <context>
        <name>DataFolderStart</name>
        <message>
            <source>Copying chats and models to {0}…</source>
            <translation>Copiando chats y modelos a {0}…</translation>
        </message>
        <message>
            <source>Keep the current folder</source>
            <translation>Mantener la carpeta actual</translation>
        </message>
        <message>
            <source>The data folder could not be changed.</source>
            <translation>No se pudo cambiar la carpeta de datos.</translation>
        </message>
        <message>
            <source>The data folder {0} is missing.</source>
            <translation>Falta la carpeta de datos {0}.</translation>
        </message>
        <message>
            <source>Plug in its drive and try again, or continue with the default folder {0}.</source>
            <translation>Conecte su unidad e inténtelo de nuevo, o continúe con la carpeta predeterminada {0}.</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>Reintentar</translation>
        </message>
        <message>
            <source>Use the default folder</source>
            <translation>Usar la carpeta predeterminada</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>Salir</translation>
        </message>
        <message>
            <source>Switchyard is already open with the data folder {0}, but does not respond. End it, in the system's task manager if necessary, and start again.</source>
            <translation>Switchyard ya está abierto con la carpeta de datos {0}, pero no responde. Finalícelo, si hace falta con el administrador de tareas, e inícielo de nuevo.</translation>
        </message>
        <message>
            <source>The data folder {0} cannot be written to; check its permissions and free space, then start again.</source>
            <translation>No se puede escribir en la carpeta de datos {0}; compruebe sus permisos y el espacio libre, y vuelva a iniciar.</translation>
        </message>
        <message>
            <source>{0} is not a file, and Switchyard keeps one there: move it away, then start again.</source>
            <translation>{0} no es un archivo, y Switchyard guarda uno ahí: muévalo y vuelva a iniciar.</translation>
        </message>
    </context>
    <context>
        <name>Diagnosis</name>
        <message>
            <source>The report could not be written to {0}: choose another folder.</source>
            <translation>No se pudo escribir el informe en {0}: elija otra carpeta.</translation>
        </message>
    </context>
    <context>
        <name>Downloads</name>
        <message>
            <source>Downloads could not be started: reinstall Switchyard.</source>
            <translation>No se pudieron iniciar las descargas: reinstale Switchyard.</translation>
        </message>
        <message>
            <source>The downloads stopped and could not be started again; try Resume.</source>
            <translation>Las descargas se detuvieron y no se pudieron reiniciar; pruebe «Reanudar».</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} de {1}</translation>
        </message>
        <message>
            <source>connecting</source>
            <translation>conectando</translation>
        </message>
        <message>
            <source>{0} left</source>
            <translation>faltan {0}</translation>
        </message>
        <message>
            <source>waits for its turn</source>
            <translation>espera su turno</translation>
        </message>
        <message>
            <source>paused</source>
            <translation>en pausa</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>error</translation>
        </message>
        <message>
            <source>done</source>
            <translation>listo</translation>
        </message>
        <message>
            <source>{0} that are already here are deleted. To keep them, pause it instead.</source>
            <translation>Se eliminarán {0} que ya están aquí. Para conservarlos, pause la descarga.</translation>
        </message>
        <message>
            <source>Cancel the download of {0}?</source>
            <translation>¿Cancelar la descarga de {0}?</translation>
        </message>
        <message>
            <source>Cancel the download</source>
            <translation>Cancelar la descarga</translation>
        </message>
        <message>
            <source>Keep it</source>
            <translation>Conservarla</translation>
        </message>
    </context>
    <context>
        <name>DownloadsCard</name>
        <message>
            <source>Downloads</source>
            <translation>Descargas</translation>
        </message>
        <message>
            <source>Speed limit</source>
            <translation>Límite de velocidad</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>como mucho {0}</translation>
        </message>
        <message>
            <source>no speed limit</source>
            <translation>sin límite de velocidad</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>Pausar</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>Reanudar</translation>
        </message>
        <message>
            <source>Access token…</source>
            <translation>Token de acceso…</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>Earlier (Alt+Up)</source>
            <translation>Antes (Alt+Arriba)</translation>
        </message>
        <message>
            <source>Later (Alt+Down)</source>
            <translation>Después (Alt+Abajo)</translation>
        </message>
    </context>
    <context>
        <name>DownloadsMark</name>
        <message>
            <source>Downloads</source>
            <translation>Descargas</translation>
        </message>
        <message>
            <source>1 download, {0}%</source>
            <translation>1 descarga, {0} %</translation>
        </message>
        <message numerus="yes">
            <source>{0} downloads, {1}%</source>
            <translation>
                <numerusform>{0} descarga, {1} %</numerusform>
                <numerusform>{0} descargas, {1} %</numerusform>
            </translation>
        </message>
        <message>
            <source>A download stopped</source>
            <translation>Se detuvo una descarga</translation>
        </message>
        <message>
            <source>{0}: show them</source>
            <translation>{0}: mostrarlas</translation>
        </message>
    </context>
    <context>
        <name>DownloadsView</name>
        <message>
            <source>Downloads</source>
            <translation>Descargas</translation>
        </message>
        <message>
            <source>Pause or resume the download</source>
            <translation>Pausar o reanudar la descarga</translation>
        </message>
        <message>
            <source>Download it earlier</source>
            <translation>Descargarlo antes</translation>
        </message>
        <message>
            <source>Download it later</source>
            <translation>Descargarlo después</translation>
        </message>
        <message>
            <source>Cancel the download</source>
            <translation>Cancelar la descarga</translation>
        </message>
    </context>
    <context>
        <name>EmptyBatch</name>
        <message>
            <source>Every row is answered, many at a time. The result file keeps the input's columns.</source>
            <translation>Se responde cada fila, muchas a la vez. El archivo de resultado conserva las columnas de la entrada.</translation>
        </message>
        <message>
            <source>Accepted: csv, tsv, jsonl, parquet, xlsx, txt, md, pdf, docx and html, a folder of such files, and OpenAI batch files.</source>
            <translation>Se admiten csv, tsv, jsonl, parquet, xlsx, txt, md, pdf, docx y html, una carpeta con esos archivos, y archivos batch de OpenAI.</translation>
        </message>
        <message>
            <source>Choose a file…</source>
            <translation>Elegir un archivo…</translation>
        </message>
        <message>
            <source>Choose a folder…</source>
            <translation>Elegir una carpeta…</translation>
        </message>
        <message>
            <source>Drop a file of prompts here</source>
            <translation>Suelte aquí un archivo de prompts</translation>
        </message>
    </context>
    <context>
        <name>EmptyChat</name>
        <message>
            <source>Ask something to begin</source>
            <translation>Pregunte algo para empezar</translation>
        </message>
        <message>
            <source>Choose a model</source>
            <translation>Elegir un modelo</translation>
        </message>
        <message>
            <source>What is the capital of France? Answer in one sentence.</source>
            <translation>¿Cuál es la capital de Francia? Responde en una frase.</translation>
        </message>
        <message>
            <source>Write one sentence about the sea.</source>
            <translation>Escribe una frase sobre el mar.</translation>
        </message>
        <message>
            <source>Why should we drink water? Answer in one sentence.</source>
            <translation>¿Por qué debemos beber agua? Responde en una frase.</translation>
        </message>
        <message>
            <source>Why do people like music? Answer in one sentence.</source>
            <translation>¿Por qué gusta la música? Responde en una frase.</translation>
        </message>
    </context>
    <context>
        <name>Engine</name>
        <message>
            <source>The graphics card limits the speed: it is busy {0} of the time, reading at {1} GB/s.</source>
            <translation>La tarjeta gráfica limita la velocidad: está ocupada el {0} del tiempo y lee a {1} GB/s.</translation>
        </message>
        <message>
            <source>The CPU limits the speed.</source>
            <translation>La CPU limita la velocidad.</translation>
        </message>
        <message>
            <source>Reading {0} from RAM limits the speed: the CPU is busy {1} of the time, at {2} GB/s.</source>
            <translation>La lectura de la RAM limita la velocidad ({0}): la CPU está ocupada el {1} del tiempo, a {2} GB/s.</translation>
        </message>
        <message>
            <source>The link to the card limits the speed: it is busy {0} of the time, at {1} GB/s.</source>
            <translation>El enlace con la tarjeta limita la velocidad: está ocupado el {0} del tiempo, a {1} GB/s.</translation>
        </message>
        <message>
            <source>CPU arithmetic limits the speed: the CPU is busy {0} of the time, and computing experts takes longer than reading them from RAM.</source>
            <translation>El cálculo de la CPU limita la velocidad: está ocupada el {0} del tiempo, y calcular los expertos tarda más que leerlos de la RAM.</translation>
        </message>
        <message>
            <source>Launching many small operations on the card limits the speed: {0} ms of the {1} ms per token.</source>
            <translation>Iniciar muchas operaciones pequeñas en la tarjeta limita la velocidad: {0} ms de los {1} ms por token.</translation>
        </message>
        <message>
            <source>Layers are read for each token: rows of a file share that, and gain most.</source>
            <translation>Se leen capas para cada token: las filas de un archivo comparten esa lectura y son las que más ganan.</translation>
        </message>
        <message>
            <source>No single change of memory, link, disk or precision would make a noticeable difference.</source>
            <translation>Ningún cambio por sí solo de memoria, enlace, disco o precisión supondría una diferencia apreciable.</translation>
        </message>
        <message>
            <source>{0} would help most: {1} tokens/s, {2} times as fast with the prompt included.</source>
            <translation>Lo que más ayudaría: {0}. {1} tokens/s, {2} veces más rápido con el prompt incluido.</translation>
        </message>
        <message>
            <source>{0} would help most: {1} tokens/s, about {2} times as fast.</source>
            <translation>Lo que más ayudaría: {0}. {1} tokens/s, unas {2} veces más rápido.</translation>
        </message>
        <message>
            <source>{0} GB of RAM</source>
            <translation>{0} GB de RAM</translation>
        </message>
        <message>
            <source>A card with {0} GB</source>
            <translation>Una tarjeta de {0} GB</translation>
        </message>
        <message>
            <source>A link to the card that is twice as fast</source>
            <translation>Un enlace con la tarjeta el doble de rápido</translation>
        </message>
        <message>
            <source>A disk that is twice as fast</source>
            <translation>Un disco el doble de rápido</translation>
        </message>
        <message>
            <source>RAM that is twice as fast</source>
            <translation>RAM el doble de rápida</translation>
        </message>
        <message>
            <source>All {0} threads</source>
            <translation>Los {0} hilos</translation>
        </message>
        <message>
            <source>expert weights</source>
            <translation>pesos de los expertos</translation>
        </message>
        <message>
            <source>as stored ({0}-bit)</source>
            <translation>como está guardado ({0} bits)</translation>
        </message>
        <message>
            <source>as stored ({0}-bit and {1}-bit)</source>
            <translation>como está guardado ({0} y {1} bits)</translation>
        </message>
        <message>
            <source>as stored ({0}-bit, {1}-bit and {2}-bit)</source>
            <translation>como está guardado ({0}, {1} y {2} bits)</translation>
        </message>
        <message>
            <source>Switchyard mixed</source>
            <translation>Switchyard mixto</translation>
        </message>
        <message>
            <source>Switchyard mixed, static</source>
            <translation>Switchyard mixto, fijo</translation>
        </message>
        <message>
            <source>Switchyard mixed, predicted</source>
            <translation>Switchyard mixto, con predicción</translation>
        </message>
        <message>
            <source>Switchyard, misses on the CPU</source>
            <translation>Switchyard, lo que falta en la CPU</translation>
        </message>
        <message>
            <source>CPU only</source>
            <translation>solo CPU</translation>
        </message>
        <message>
            <source>CPU experts</source>
            <translation>expertos en la CPU</translation>
        </message>
        <message>
            <source>on-demand</source>
            <translation>bajo demanda</translation>
        </message>
        <message>
            <source>whole-layer prefetch</source>
            <translation>capas enteras por adelantado</translation>
        </message>
        <message>
            <source>the other weights and the KV cache</source>
            <translation>los demás pesos y la caché KV</translation>
        </message>
        <message>
            <source>the weights and the KV cache</source>
            <translation>los pesos y la caché KV</translation>
        </message>
        <message>
            <source>From now on: {0}, {1} tokens/s.</source>
            <translation>Desde ahora: {0}, {1} tokens/s.</translation>
        </message>
        <message>
            <source>Before: {0} tokens/s, so {1} times.</source>
            <translation>Antes: {0} tokens/s, es decir, {1} veces más rápido.</translation>
        </message>
        <message>
            <source>Before, it could not run.</source>
            <translation>Antes no podía funcionar.</translation>
        </message>
        <message>
            <source>The settings stay the same: {0} tokens/s, and nothing else is better.</source>
            <translation>Los ajustes siguen igual: {0} tokens/s, y nada más es mejor.</translation>
        </message>
        <message>
            <source>{0} did not answer within {1} seconds.</source>
            <translation>{0} no respondió en {1} segundos.</translation>
        </message>
        <message>
            <source>{0} did not speak MCP within {1} seconds of its start: check its command or address.</source>
            <translation>{0} no habló MCP en los {1} segundos siguientes a su inicio: compruebe su comando o dirección.</translation>
        </message>
        <message>
            <source>{0} ended in the middle of it.</source>
            <translation>{0} terminó a mitad de la llamada.</translation>
        </message>
        <message>
            <source>{0} sent more than {1} MB at once, and was stopped.</source>
            <translation>{0} envió más de {1} MB de una vez y se detuvo.</translation>
        </message>
        <message>
            <source>{0} could not be started ({1}): check its command.</source>
            <translation>No se pudo iniciar {0} ({1}): compruebe su comando.</translation>
        </message>
        <message>
            <source>{0} ended, or does not speak MCP.</source>
            <translation>{0} terminó o no habla MCP.</translation>
        </message>
        <message>
            <source>{0} ended, or does not speak MCP. It wrote: {1}</source>
            <translation>{0} terminó o no habla MCP. Escribió: {1}</translation>
        </message>
        <message>
            <source>Give the server a name.</source>
            <translation>Dé un nombre al servidor.</translation>
        </message>
        <message>
            <source>{0} needs either a command or an address: enter one of them.</source>
            <translation>{0} necesita un comando o una dirección: indique uno de los dos.</translation>
        </message>
        <message>
            <source>This is not JSON ({0}): paste the whole block.</source>
            <translation>Esto no es JSON ({0}): pegue el bloque entero.</translation>
        </message>
        <message>
            <source>The user did not allow this call.</source>
            <translation>Esta llamada no se permitió.</translation>
        </message>
        <message>
            <source>There is no tool of this name.</source>
            <translation>No hay ninguna herramienta con este nombre.</translation>
        </message>
        <message>
            <source>The expression divides by zero.</source>
            <translation>La expresión divide por cero.</translation>
        </message>
        <message>
            <source>No folder is attached to this chat: attach one first.</source>
            <translation>Este chat no tiene ninguna carpeta adjunta: adjunte una primero.</translation>
        </message>
        <message>
            <source>{0} was removed or is off.</source>
            <translation>{0} se quitó o está desactivado.</translation>
        </message>
        <message>
            <source>The process with the tools ended.</source>
            <translation>El proceso de las herramientas terminó.</translation>
        </message>
        <message>
            <source>The process with the tools could not be started.</source>
            <translation>No se pudo iniciar el proceso de las herramientas.</translation>
        </message>
        <message>
            <source>The tools did not respond, and were stopped.</source>
            <translation>Las herramientas no respondían y se detuvieron.</translation>
        </message>
        <message>
            <source>The call was stopped.</source>
            <translation>La llamada se detuvo.</translation>
        </message>
        <message>
            <source>The arguments are no JSON object.</source>
            <translation>Los argumentos no son un objeto JSON.</translation>
        </message>
        <message>
            <source>{0} was called with the same arguments {1} times: no more calls, answer now.</source>
            <translation>Se llamó a {0} {1} veces con los mismos argumentos: no hay más llamadas, responde ahora.</translation>
        </message>
        <message>
            <source>Tools were called {0} times in a row: no more calls, answer now.</source>
            <translation>Se llamó a herramientas {0} veces seguidas: no hay más llamadas, responde ahora.</translation>
        </message>
        <message>
            <source>More than {0} tools were called at once: no more calls, answer now.</source>
            <translation>Se llamó a más de {0} herramientas a la vez: no hay más llamadas, responde ahora.</translation>
        </message>
        <message>
            <source>{0} has no command and no address: enter one of them.</source>
            <translation>{0} no tiene ni comando ni dirección: indique uno de los dos.</translation>
        </message>
        <message>
            <source>The address of {0} does not begin with http:// or https://: correct it.</source>
            <translation>La dirección de {0} no empieza por http:// ni https://: corríjala.</translation>
        </message>
        <message>
            <source>The arguments of {0} are not a list of texts: correct them.</source>
            <translation>Los argumentos de {0} no son una lista de textos: corríjalos.</translation>
        </message>
        <message>
            <source>The command of {0} has a character that no command can have: correct it.</source>
            <translation>El comando de {0} tiene un carácter que ningún comando puede tener: corríjalo.</translation>
        </message>
        <message>
            <source>The variables or headers of {0} are not names with texts: correct them.</source>
            <translation>Las variables o cabeceras de {0} no son nombres con textos: corríjalas.</translation>
        </message>
        <message>
            <source>No servers are in it: it needs "mcpServers" with a name for each.</source>
            <translation>No contiene ningún servidor: necesita "mcpServers" con un nombre para cada uno.</translation>
        </message>
        <message>
            <source>{0} servers are too many: up to {1} can be added.</source>
            <translation>{0} servidores son demasiados: se pueden añadir hasta {1}.</translation>
        </message>
        <message>
            <source>{0} needs its {1} again, which was kept for one run only: edit the server.</source>
            <translation>{0} necesita de nuevo su {1}, que solo se guardó durante una ejecución: edite el servidor.</translation>
        </message>
        <message>
            <source>{0} needs {1} in the environment, where it is not set: set it.</source>
            <translation>{0} necesita {1} en el entorno, donde no está definida: defínala.</translation>
        </message>
        <message>
            <source>No documents are attached to this chat.</source>
            <translation>Este chat no tiene documentos adjuntos.</translation>
        </message>
        <message>
            <source>There is no tool named {0}.</source>
            <translation>No hay ninguna herramienta llamada {0}.</translation>
        </message>
        <message>
            <source>A batch has a prompt and 1 to {0} rows.</source>
            <translation>Un lote tiene un prompt y de 1 a {0} filas.</translation>
        </message>
        <message>
            <source>The rows cannot be written to {0} ({1}).</source>
            <translation>Las filas no se pueden escribir en {0} ({1}).</translation>
        </message>
        <message>
            <source>The file {0} cannot be read ({1}).</source>
            <translation>El archivo {0} no se puede leer ({1}).</translation>
        </message>
        <message>
            <source>The file {0} is no text.</source>
            <translation>El archivo {0} no es de texto.</translation>
        </message>
        <message>
            <source>No attached folder has a file {0}.</source>
            <translation>Ninguna carpeta adjunta tiene un archivo {0}.</translation>
        </message>
        <message>
            <source>The result has too many digits.</source>
            <translation>El resultado tiene demasiados dígitos.</translation>
        </message>
        <message>
            <source>The result is no real number.</source>
            <translation>El resultado no es un número real.</translation>
        </message>
        <message>
            <source>A factorial is of a whole number from 0 to 1000.</source>
            <translation>Un factorial es de un número entero de 0 a 1000.</translation>
        </message>
        <message>
            <source>An expression has 1 to {0} characters.</source>
            <translation>Una expresión tiene de 1 a {0} caracteres.</translation>
        </message>
        <message>
            <source>The expression cannot be read ({0}).</source>
            <translation>La expresión no se puede leer ({0}).</translation>
        </message>
        <message>
            <source>The expression cannot be computed ({0}).</source>
            <translation>La expresión no se puede calcular ({0}).</translation>
        </message>
        <message>
            <source>Only numbers, + - * / // % **, and functions such as sqrt, log, sin and round are computed.</source>
            <translation>Solo se calculan números, + - * / // % ** y funciones como sqrt, log, sin y round.</translation>
        </message>
        <message>
            <source>The starter model is not on this machine yet.</source>
            <translation>El modelo inicial aún no está en esta máquina.</translation>
        </message>
        <message>
            <source>There is no file {0}: check the path.</source>
            <translation>No existe el archivo {0}: compruebe la ruta.</translation>
        </message>
        <message>
            <source>There is no folder {0}: check the path.</source>
            <translation>No existe la carpeta {0}: compruebe la ruta.</translation>
        </message>
        <message>
            <source>There is no model at {0}: check the path.</source>
            <translation>No hay ningún modelo en {0}: compruebe la ruta.</translation>
        </message>
        <message>
            <source>{0} is not a folder: check the path.</source>
            <translation>{0} no es una carpeta: compruebe la ruta.</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}): check the path.</source>
            <translation>No se puede leer {0} ({1}): compruebe la ruta.</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}): download or copy the model again.</source>
            <translation>No se puede leer {0} ({1}): descargue o copie de nuevo el modelo.</translation>
        </message>
        <message>
            <source>{0} has no {1}, so it is not a complete model: download or copy it again.</source>
            <translation>A {0} le falta {1}, así que no es un modelo completo: descárguelo o cópielo de nuevo.</translation>
        </message>
        <message>
            <source>{0} is a pickle file, which can run code when opened, so Switchyard never loads one: use the model's safetensors version.</source>
            <translation>{0} es un archivo pickle, que puede ejecutar código al abrirse; Switchyard nunca carga uno: use la versión safetensors del modelo.</translation>
        </message>
        <message>
            <source>{0} is in use: unload it in Switchyard's window, end other programs with it, and try again.</source>
            <translation>{0} está en uso: descárguelo de memoria en la ventana de Switchyard, cierre otros programas que lo usen e inténtelo de nuevo.</translation>
        </message>
        <message>
            <source>{0} is being moved or removed: wait until that is done.</source>
            <translation>{0} se está moviendo o quitando: espere a que termine.</translation>
        </message>
        <message>
            <source>{0} exists already: choose another name.</source>
            <translation>{0} ya existe: elija otro nombre.</translation>
        </message>
        <message>
            <source>{0} is already in the library.</source>
            <translation>{0} ya está en la biblioteca.</translation>
        </message>
        <message>
            <source>The model folder {0} is not there: connect its disk, or take the folder off the list.</source>
            <translation>La carpeta de modelos {0} no está: conecte su disco o quite la carpeta de la lista.</translation>
        </message>
        <message>
            <source>The disk of {0} is full: make room and try again.</source>
            <translation>El disco de {0} está lleno: haga sitio e inténtelo de nuevo.</translation>
        </message>
        <message>
            <source>The disk of {0} is full: make room and let the download go on; nothing is lost.</source>
            <translation>El disco de {0} está lleno: haga sitio y reanude la descarga; no se ha perdido nada.</translation>
        </message>
        <message>
            <source>The disk of {0} is full: free some space, and the job continues.</source>
            <translation>El disco de {0} está lleno: libere espacio y la tarea continuará.</translation>
        </message>
        <message>
            <source>Cannot read or write {0} ({1}): check its permissions and the disk.</source>
            <translation>No se puede leer o escribir {0} ({1}): compruebe los permisos y el disco.</translation>
        </message>
        <message>
            <source>{0} needs {1} of RAM{2}, but only {3} are free: close other programs or choose a smaller model.</source>
            <translation>{0} necesita {1} de RAM{2}, pero solo hay {3} libres: cierre otros programas o elija un modelo más pequeño.</translation>
        </message>
        <message>
            <source>{0} needs {1} of RAM{2}, more than the {3} that the RAM budget allows: raise the budget or choose a smaller model.</source>
            <translation>{0} necesita {1} de RAM{2}, más de los {3} que permite el presupuesto de RAM: auméntelo o elija un modelo más pequeño.</translation>
        </message>
        <message>
            <source>{0} ran out of memory: close other programs, or allow the model less memory or a shorter context.</source>
            <translation>{0} se quedó sin memoria: cierre otros programas, o dé al modelo menos memoria o un contexto más corto.</translation>
        </message>
        <message>
            <source>{0} has no graphics card: choose one first.</source>
            <translation>{0} no tiene tarjeta gráfica: elija una primero.</translation>
        </message>
        <message>
            <source>The graphics card stopped responding, so the model runs on the CPU now.</source>
            <translation>La tarjeta gráfica dejó de responder, así que el modelo funciona ahora en la CPU.</translation>
        </message>
        <message>
            <source>The NVIDIA driver does not respond: restart the computer, or update the driver.</source>
            <translation>El controlador de NVIDIA no responde: reinicie el equipo o actualice el controlador.</translation>
        </message>
        <message>
            <source>No NVIDIA driver was found.</source>
            <translation>No se encontró ningún controlador de NVIDIA.</translation>
        </message>
        <message>
            <source>The {0} was {1} and is now {2}.</source>
            <translation>Lo que ha cambiado: {0}, antes {1}, ahora {2}.</translation>
        </message>
        <message>
            <source>The prompt is {0} tokens long, but this model holds {1} together with the answer: shorten it by {2} tokens, or start a new chat.</source>
            <translation>El prompt tiene {0} tokens, pero este modelo admite {1} junto con la respuesta: acórtelo en {2} tokens o empiece un chat nuevo.</translation>
        </message>
        <message>
            <source>No model is loaded: choose one first.</source>
            <translation>No hay ningún modelo cargado: elija uno primero.</translation>
        </message>
        <message>
            <source>There was not enough memory to choose this answer's next token: close other programs and ask again.</source>
            <translation>No hubo memoria suficiente para elegir el siguiente token de esta respuesta: cierre otros programas y pregunte de nuevo.</translation>
        </message>
        <message>
            <source>Could not read {0} from {1} ({2}): check the network; models on this PC still work.</source>
            <translation>No se pudo leer {0} de {1} ({2}): compruebe la red; los modelos de este PC siguen funcionando.</translation>
        </message>
        <message>
            <source>{0} cannot be reached: waiting for the network.</source>
            <translation>No se puede alcanzar {0}: esperando a la red.</translation>
        </message>
        <message>
            <source>The connection to {0} broke: trying again.</source>
            <translation>Se cortó la conexión con {0}: intentándolo de nuevo.</translation>
        </message>
        <message>
            <source>{0} sends nothing: waiting.</source>
            <translation>{0} no envía nada: esperando.</translation>
        </message>
        <message>
            <source>{0} gives {1} only to those it knows: enter an access token of an account that may read it.</source>
            <translation>{0} solo da {1} a quienes conoce: introduzca un token de acceso de una cuenta que pueda leerlo.</translation>
        </message>
        <message>
            <source>{0} got too many requests from here: try again {1}.</source>
            <translation>{0} recibió demasiadas peticiones desde aquí: inténtelo más tarde ({1}).</translation>
        </message>
        <message>
            <source>{0} gave no answer ({1}): check that the server runs, and the network.</source>
            <translation>{0} no respondió ({1}): compruebe que el servidor esté en marcha, y la red.</translation>
        </message>
        <message>
            <source>There is no server with OpenAI's interface at {0} ({1}): check the address.</source>
            <translation>No hay ningún servidor con la interfaz de OpenAI en {0} ({1}): compruebe la dirección.</translation>
        </message>
        <message>
            <source>{0} is not an address of a server: it must begin with http:// or https://.</source>
            <translation>{0} no es la dirección de un servidor: debe empezar por http:// o https://.</translation>
        </message>
        <message>
            <source>{0} is not an address: enter one such as http://10.0.0.5:8000/v1.</source>
            <translation>{0} no es una dirección: introduzca una como http://10.0.0.5:8000/v1.</translation>
        </message>
        <message>
            <source>There is an endpoint called {0} already, or nearly so: choose another name.</source>
            <translation>Ya hay un servidor llamado {0}, o casi: elija otro nombre.</translation>
        </message>
        <message>
            <source>This is not a key: copy it again, in one piece and without spaces.</source>
            <translation>Esto no es una clave: cópiela de nuevo, entera y sin espacios.</translation>
        </message>
        <message>
            <source>This is not a token: copy it again from the hub's settings page, in one piece.</source>
            <translation>Esto no es un token: cópielo de nuevo desde la página de configuración del hub, entero.</translation>
        </message>
        <message>
            <source>This file holds no certificate in PEM.</source>
            <translation>Este archivo no contiene ningún certificado PEM.</translation>
        </message>
        <message>
            <source>{0} has no rows: there is nothing to answer.</source>
            <translation>{0} no tiene filas: no hay nada que responder.</translation>
        </message>
        <message>
            <source>{0} cannot be written ({1}): choose another output.</source>
            <translation>No se puede escribir {0} ({1}): elija otra salida.</translation>
        </message>
        <message>
            <source>{0} is within the input: choose another output.</source>
            <translation>{0} está dentro de la entrada: elija otra salida.</translation>
        </message>
        <message>
            <source>{0} is protected by a password or is an old .xls: save it as .xlsx without a password.</source>
            <translation>{0} está protegido con contraseña o es un .xls antiguo: guárdelo como .xlsx sin contraseña.</translation>
        </message>
        <message>
            <source>Another run is working on the job of {0}: wait for it or stop it first.</source>
            <translation>Otra ejecución trabaja en la tarea de {0}: espérela o deténgala primero.</translation>
        </message>
        <message>
            <source>{0} was stopped.</source>
            <translation>{0} se detuvo.</translation>
        </message>
        <message>
            <source>{0} failed: {1}.</source>
            <translation>{0} falló: {1}.</translation>
        </message>
    </context>
    <context>
        <name>EngineCard</name>
        <message>
            <source>First, the engine</source>
            <translation>Primero, el motor</translation>
        </message>
        <message>
            <source>Progress of the engine</source>
            <translation>Progreso del motor</translation>
        </message>
        <message>
            <source>Get the engine and the starter</source>
            <translation>Obtener el motor y el modelo inicial</translation>
        </message>
        <message>
            <source>Engine only</source>
            <translation>Solo el motor</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>Reanudar</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>Reintentar</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>Pausar</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>Use a file…</source>
            <translation>Usar un archivo…</translation>
        </message>
        <message>
            <source>For a computer without a network: files that another computer has fetched</source>
            <translation>Para un equipo sin red: archivos que ha descargado otro equipo</translation>
        </message>
        <message>
            <source>Mirror and proxy…</source>
            <translation>Réplica y proxy…</translation>
        </message>
        <message>
            <source>The engine's files (*.zip *.whl)</source>
            <translation>Los archivos del motor (*.zip *.whl)</translation>
        </message>
        <message>
            <source>The engine's files</source>
            <translation>Los archivos del motor</translation>
        </message>
    </context>
    <context>
        <name>EngineClient</name>
        <message>
            <source>The engine was restarted before this request was done.</source>
            <translation>El motor se reinició antes de terminar esta petición.</translation>
        </message>
        <message>
            <source>The engine is not running; start it first.</source>
            <translation>El motor no está en marcha; inícielo primero.</translation>
        </message>
        <message>
            <source>The engine uses protocol version {0} and this window version {1}: two installations are mixed, so reinstall Switchyard.</source>
            <translation>El motor usa la versión {0} del protocolo y esta ventana la {1}: se han mezclado dos instalaciones; reinstale Switchyard.</translation>
        </message>
        <message>
            <source>The engine was stopped before this request was done.</source>
            <translation>El motor se detuvo antes de terminar esta petición.</translation>
        </message>
        <message>
            <source>The engine has not responded for {0} seconds: wait, or restart it.</source>
            <translation>El motor no responde desde hace {0} segundos: espere o reinícielo.</translation>
        </message>
        <message>
            <source>A file of {0} became shorter, or its disk failed, while it was in use. Put the whole file back, then restart the engine.</source>
            <translation>Un archivo de {0} se acortó, o falló su disco, mientras estaba en uso. Vuelva a poner el archivo completo y reinicie el motor.</translation>
        </message>
        <message>
            <source>The engine exited unexpectedly (code {0}); see its log for details.</source>
            <translation>El motor terminó inesperadamente (código {0}); consulte los detalles en su registro.</translation>
        </message>
        <message>
            <source>The engine crashed (status {0}).</source>
            <translation>El motor falló (estado {0}).</translation>
        </message>
        <message>
            <source>The engine was killed (signal 9), perhaps for lack of memory.</source>
            <translation>El sistema finalizó el motor (señal 9), quizá por falta de memoria.</translation>
        </message>
        <message>
            <source>The engine crashed (signal 4): this processor lacks an instruction that it used.</source>
            <translation>El motor falló (señal 4): a este procesador le falta una instrucción que se usó.</translation>
        </message>
        <message>
            <source>The engine crashed (signal {0}: {1}).</source>
            <translation>El motor falló (señal {0}: {1}).</translation>
        </message>
    </context>
    <context>
        <name>EnginePart</name>
        <message>
            <source>The installation was stopped. Nothing is lost: try again.</source>
            <translation>La instalación se interrumpió. No se ha perdido nada: inténtelo de nuevo.</translation>
        </message>
    </context>
    <context>
        <name>ExpertCard</name>
        <message>
            <source>Expert map</source>
            <translation>Mapa de expertos</translation>
        </message>
        <message>
            <source>A model like this has many small parts in each layer, called experts, and every token uses only a few of them. Each square is one expert: the stronger its colour, the more it is used; its pattern shows where it is stored.</source>
            <translation>Un modelo así tiene en cada capa muchas partes pequeñas, llamadas expertos, y cada token usa solo unas pocas. Cada cuadrado es un experto: cuanto más intenso su color, más se usa; su trama indica dónde está.</translation>
        </message>
        <message>
            <source>By use</source>
            <translation>Por uso</translation>
        </message>
        <message>
            <source>Sort each layer's experts by use instead of by number</source>
            <translation>Ordenar los expertos de cada capa por uso en lugar de por número</translation>
        </message>
        <message>
            <source>Table</source>
            <translation>Tabla</translation>
        </message>
        <message>
            <source>The same experts as numbers, sorted by any column</source>
            <translation>Los mismos expertos en cifras, ordenables por columna</translation>
        </message>
        <message>
            <source>Show the experts as a table</source>
            <translation>Mostrar los expertos como tabla</translation>
        </message>
        <message>
            <source>Time in the recorded session</source>
            <translation>Momento de la sesión grabada</translation>
        </message>
        <message>
            <source>Scrubs through the session's maps</source>
            <translation>Recorre los mapas de la sesión</translation>
        </message>
        <message>
            <source>Load a model with experts and ask something: each square is an expert.</source>
            <translation>Cargue un modelo con expertos y pregunte algo: cada cuadrado es un experto.</translation>
        </message>
        <message>
            <source>{0} × {1}</source>
            <translation>{0} × {1}</translation>
        </message>
        <message>
            <source>{0} layers with {1} experts each</source>
            <translation>{0} capas con {1} expertos cada una</translation>
        </message>
        <message>
            <source>Experts as a table</source>
            <translation>Expertos como tabla</translation>
        </message>
    </context>
    <context>
        <name>ExpertMap</name>
        <message>
            <source>in VRAM</source>
            <translation>en VRAM</translation>
        </message>
        <message>
            <source>fetching</source>
            <translation>trayendo</translation>
        </message>
        <message>
            <source>in RAM</source>
            <translation>en RAM</translation>
        </message>
        <message>
            <source>on disk</source>
            <translation>en disco</translation>
        </message>
    </context>
    <context>
        <name>ExpertMapView</name>
        <message>
            <source>Expert map</source>
            <translation>Mapa de expertos</translation>
        </message>
        <message>
            <source>Layers by experts. Arrow keys move from expert to expert.</source>
            <translation>Capas por expertos. Las flechas van de experto en experto.</translation>
        </message>
        <message>
            <source>Layer {0}, expert {1}</source>
            <translation>Capa {0}, experto {1}</translation>
        </message>
        <message>
            <source>used {0} times</source>
            <translation>usado {0} veces</translation>
        </message>
        <message>
            <source>hit {0}%</source>
            <translation>acierto {0} %</translation>
        </message>
        <message>
            <source>never used</source>
            <translation>nunca usado</translation>
        </message>
        <message>
            <source>last {0} steps ago</source>
            <translation>último uso hace {0} pasos</translation>
        </message>
    </context>
    <context>
        <name>ExpertTable</name>
        <message>
            <source>Layer</source>
            <translation>Capa</translation>
        </message>
        <message>
            <source>Expert</source>
            <translation>Experto</translation>
        </message>
        <message>
            <source>Uses</source>
            <translation>Usos</translation>
        </message>
        <message>
            <source>Hits</source>
            <translation>Aciertos</translation>
        </message>
        <message>
            <source>Steps ago</source>
            <translation>Hace (pasos)</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>Tamaño</translation>
        </message>
        <message>
            <source>Where</source>
            <translation>Dónde</translation>
        </message>
    </context>
    <context>
        <name>ExportButton</name>
        <message>
            <source>Export</source>
            <translation>Exportar</translation>
        </message>
        <message>
            <source>Contains no text of prompts or answers</source>
            <translation>No contiene texto de prompts ni de respuestas</translation>
        </message>
        <message>
            <source>Trace for Perfetto and Chrome (JSON)…</source>
            <translation>Traza para Perfetto y Chrome (JSON)…</translation>
        </message>
        <message>
            <source>Tables of spans and steps (CSV)…</source>
            <translation>Tablas de tramos y pasos (CSV)…</translation>
        </message>
        <message>
            <source>Picture (PNG)…</source>
            <translation>Imagen (PNG)…</translation>
        </message>
        <message>
            <source>Drawing (SVG)…</source>
            <translation>Dibujo (SVG)…</translation>
        </message>
        <message>
            <source>Nothing to export yet: ask something in Chat first.</source>
            <translation>Aún no hay nada que exportar: pregunte primero algo en Chat.</translation>
        </message>
        <message>
            <source>{0} spans written to {1}</source>
            <translation>{0} tramos escritos en {1}</translation>
        </message>
        <message>
            <source>Written to {0}</source>
            <translation>Guardado en {0}</translation>
        </message>
        <message>
            <source>{0} could not be written; choose another folder.</source>
            <translation>No se pudo escribir {0}; elija otra carpeta.</translation>
        </message>
        <message>
            <source>{0} could not be written ({1}); choose another folder.</source>
            <translation>No se pudo escribir {0} ({1}); elija otra carpeta.</translation>
        </message>
    </context>
    <context>
        <name>FindBar</name>
        <message>
            <source>Find in this chat</source>
            <translation>Buscar en este chat</translation>
        </message>
        <message>
            <source>Previous match  Shift+F3</source>
            <translation>Coincidencia anterior  Mayús+F3</translation>
        </message>
        <message>
            <source>Next match  F3</source>
            <translation>Coincidencia siguiente  F3</translation>
        </message>
        <message>
            <source>Close  Esc</source>
            <translation>Cerrar  Esc</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} de {1}</translation>
        </message>
        <message>
            <source>looking…</source>
            <translation>buscando…</translation>
        </message>
        <message>
            <source>not in this chat</source>
            <translation>no está en este chat</translation>
        </message>
    </context>
    <context>
        <name>FirstRun</name>
        <message>
            <source>{0} with {1}</source>
            <translation>{0} con {1}</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 núcleo</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} núcleo</numerusform>
                <numerusform>{0} núcleos</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} of RAM, {1}</source>
            <translation>{0} de RAM, {1}</translation>
        </message>
        <message>
            <source>{0} free on the disk for models</source>
            <translation>{0} libres en disco para modelos</translation>
        </message>
        <message>
            <source>Models of up to about {0} run from memory; parts of larger ones are read from the disk as they answer, which takes longer.</source>
            <translation>Los modelos de hasta unos {0} se ejecutan en memoria; de los más grandes se leen partes del disco mientras responden, lo que tarda más.</translation>
        </message>
        <message>
            <source>This processor has no AVX2: everything works, but takes several times as long.</source>
            <translation>Este procesador no tiene AVX2: todo funciona, pero tarda varias veces más.</translation>
        </message>
        <message>
            <source>Graphics card and processor share the work.</source>
            <translation>La tarjeta gráfica y el procesador se reparten el trabajo.</translation>
        </message>
        <message>
            <source>The graphics card cannot be used here: the processor does the work.</source>
            <translation>La tarjeta gráfica no se puede usar aquí: trabaja el procesador.</translation>
        </message>
        <message>
            <source>There is no graphics card for models: the processor does the work.</source>
            <translation>No hay tarjeta gráfica para modelos: trabaja el procesador.</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>Examinando este PC…</translation>
        </message>
        <message>
            <source>no graphics card that PyTorch can use</source>
            <translation>ninguna tarjeta gráfica que PyTorch pueda usar</translation>
        </message>
        <message>
            <source>Found: {0}. Everything is here already, and is prepared for this version.</source>
            <translation>Encontrado: {0}. Todo está aquí ya y se prepara para esta versión.</translation>
        </message>
        <message>
            <source>It is fetched once: {0}, about {1} on the disk when it is unpacked.</source>
            <translation>Se descarga una sola vez: {0}, unos {1} en disco ya descomprimido.</translation>
        </message>
        <message>
            <source>The engine with PyTorch for {0} suits this PC.</source>
            <translation>El motor con PyTorch para {0} es adecuado para este PC.</translation>
        </message>
        <message>
            <source>Found: {0}. The engine comes with PyTorch for {1}.</source>
            <translation>Encontrado: {0}. El motor viene con PyTorch para {1}.</translation>
        </message>
        <message>
            <source>Checking what was fetched…</source>
            <translation>Comprobando la descarga…</translation>
        </message>
        <message>
            <source>Unpacking…</source>
            <translation>Descomprimiendo…</translation>
        </message>
        <message>
            <source>Testing it on this PC…</source>
            <translation>Probándolo en este PC…</translation>
        </message>
        <message>
            <source>Finishing…</source>
            <translation>Finalizando…</translation>
        </message>
        <message>
            <source>Installing…</source>
            <translation>Instalando…</translation>
        </message>
    </context>
    <context>
        <name>FirstRunPage</name>
        <message>
            <source>This PC</source>
            <translation>Este PC</translation>
        </message>
        <message>
            <source>Recommended for this PC</source>
            <translation>Recomendados para este PC</translation>
        </message>
        <message>
            <source>Just try the starter</source>
            <translation>Probar solo el modelo inicial</translation>
        </message>
        <message>
            <source>A small Mixture of Experts that runs on any machine, converted here from a PyPI package, for a first look. It gets facts wrong and may repeat itself.</source>
            <translation>Un pequeño «Mixture of Experts» que funciona en cualquier máquina, convertido aquí a partir de un paquete de PyPI, para un primer vistazo. Se equivoca en los datos y a veces se repite.</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>Examinando este PC…</translation>
        </message>
        <message>
            <source>Choose a first model</source>
            <translation>Elegir un primer modelo</translation>
        </message>
        <message>
            <source>Welcome to Switchyard</source>
            <translation>Bienvenido a Switchyard</translation>
        </message>
        <message>
            <source>Open a model file…</source>
            <translation>Abrir un archivo de modelo…</translation>
        </message>
        <message>
            <source>Search for others…</source>
            <translation>Buscar otros…</translation>
        </message>
        <message>
            <source>Use a remote server…</source>
            <translation>Usar un servidor remoto…</translation>
        </message>
        <message>
            <source>Go to the chats</source>
            <translation>Ir a los chats</translation>
        </message>
        <message>
            <source>First the engine, then a model. Nothing is downloaded before you click.</source>
            <translation>Primero el motor, después un modelo. No se descarga nada antes de su clic.</translation>
        </message>
        <message>
            <source>Choose a first model. Nothing is downloaded before you click.</source>
            <translation>Elija un primer modelo. No se descarga nada antes de su clic.</translation>
        </message>
        <message>
            <source>No model of the catalogue suits this PC: the starter runs everywhere.</source>
            <translation>Ningún modelo del catálogo es adecuado para este PC: el modelo inicial funciona en todas partes.</translation>
        </message>
    </context>
    <context>
        <name>Fit</name>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>{0} MB</source>
            <translation>{0} MB</translation>
        </message>
        <message>
            <source>Fast</source>
            <translation>Rápido</translation>
        </message>
        <message>
            <source>Works</source>
            <translation>Funciona</translation>
        </message>
        <message>
            <source>Batch only</source>
            <translation>Solo lotes</translation>
        </message>
        <message>
            <source>Too large</source>
            <translation>No cabe</translation>
        </message>
        <message>
            <source>original</source>
            <translation>original</translation>
        </message>
        <message>
            <source>near-original</source>
            <translation>casi original</translation>
        </message>
        <message>
            <source>good quality</source>
            <translation>buena calidad</translation>
        </message>
        <message>
            <source>fair quality</source>
            <translation>calidad media</translation>
        </message>
        <message>
            <source>poor quality</source>
            <translation>calidad baja</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>about {0} tokens/s</source>
            <translation>unos {0} tokens/s</translation>
        </message>
        <message>
            <source>measured here</source>
            <translation>medido aquí</translation>
        </message>
        <message>
            <source>estimated, {0} to {1}</source>
            <translation>estimado, {0} a {1}</translation>
        </message>
        <message>
            <source>first token after {0} s</source>
            <translation>primer token a los {0} s</translation>
        </message>
        <message>
            <source>first token after about {0} s</source>
            <translation>primer token a los {0} s aprox.</translation>
        </message>
        <message>
            <source>pictures: about {0} s each on the graphics card, {1}</source>
            <translation>imágenes: unos {0} s cada una en la tarjeta gráfica, {1}</translation>
        </message>
        <message>
            <source>pictures: about {0} s each on the CPU, {1}</source>
            <translation>imágenes: unos {0} s cada una en la CPU, {1}</translation>
        </message>
        <message>
            <source>download</source>
            <translation>descarga</translation>
        </message>
        <message>
            <source>converted weights</source>
            <translation>pesos convertidos</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Disco</translation>
        </message>
        <message>
            <source>Library</source>
            <translation>Biblioteca</translation>
        </message>
        <message>
            <source>recommended</source>
            <translation>recomendado</translation>
        </message>
        <message numerus="yes">
            <source>{0} and {1} more</source>
            <translation>
                <numerusform>{0} y {1} más</numerusform>
                <numerusform>{0} y {1} más</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} GB</source>
            <translation>{0} GB</translation>
        </message>
        <message>
            <source>{0} GB/s</source>
            <translation>{0} GB/s</translation>
        </message>
        <message>
            <source>{0} s</source>
            <translation>{0} s</translation>
        </message>
        <message>
            <source>{0} min</source>
            <translation>{0} min</translation>
        </message>
        <message>
            <source>{0} h {1} min</source>
            <translation>{0} h {1} min</translation>
        </message>
        <message>
            <source>{0} h</source>
            <translation>{0} h</translation>
        </message>
        <message numerus="yes">
            <source>{0} days</source>
            <translation>
                <numerusform>{0} día</numerusform>
                <numerusform>{0} días</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} MB/s</source>
            <translation>{0} MB/s</translation>
        </message>
    </context>
    <context>
        <name>FitCardView</name>
        <message>
            <source>Context in tokens</source>
            <translation>Contexto en tokens</translation>
        </message>
        <message>
            <source>Memory for the expert cache</source>
            <translation>Memoria para la caché de expertos</translation>
        </message>
        <message>
            <source>VRAM to use</source>
            <translation>VRAM que usar</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Descargar</translation>
        </message>
        <message>
            <source>Load anyway…</source>
            <translation>Cargar de todos modos…</translation>
        </message>
        <message>
            <source>RAM to use</source>
            <translation>RAM que usar</translation>
        </message>
        <message>
            <source>Reading what the repository holds…</source>
            <translation>Leyendo el contenido del repositorio…</translation>
        </message>
        <message>
            <source>Reading headers: {0} of {1} files…</source>
            <translation>Leyendo cabeceras: {0} de {1} archivos…</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} tokens</translation>
        </message>
        <message>
            <source>all that is free</source>
            <translation>todo lo que esté libre</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>como mucho {0}</translation>
        </message>
        <message>
            <source>runs in {0}</source>
            <translation>se ejecuta en {0}</translation>
        </message>
        <message>
            <source>keys and values of that context: {0}</source>
            <translation>claves y valores de ese contexto: {0}</translation>
        </message>
        <message>
            <source>Download {0}</source>
            <translation>Descargar {0}</translation>
        </message>
        <message>
            <source>Downloading {0}</source>
            <translation>Descargando {0}</translation>
        </message>
        <message>
            <source>Load {0}</source>
            <translation>Cargar {0}</translation>
        </message>
        <message>
            <source>Load {0} anyway</source>
            <translation>Cargar {0} de todos modos</translation>
        </message>
        <message>
            <source>There is no {0} here. {1} would be downloaded: choose another row to take that one.</source>
            <translation>Aquí no hay {0}. Se descargaría {1}: elija otra fila para tomar esa.</translation>
        </message>
        <message>
            <source>No file was named. {0} would be downloaded: choose another row to take that one.</source>
            <translation>No se indicó ningún archivo. Se descargaría {0}: elija otra fila para tomar esa.</translation>
        </message>
        <message>
            <source>Context</source>
            <translation>Contexto</translation>
        </message>
    </context>
    <context>
        <name>FitDelegate</name>
        <message>
            <source>recommended</source>
            <translation>recomendado</translation>
        </message>
    </context>
    <context>
        <name>FitTable</name>
        <message>
            <source>File</source>
            <translation>Archivo</translation>
        </message>
        <message>
            <source>Memory</source>
            <translation>Memoria</translation>
        </message>
        <message>
            <source>Speed</source>
            <translation>Velocidad</translation>
        </message>
        <message>
            <source>On this PC</source>
            <translation>En este PC</translation>
        </message>
        <message>
            <source>Files, and how they would run here</source>
            <translation>Archivos, y cómo funcionarían aquí</translation>
        </message>
    </context>
    <context>
        <name>FoldCard</name>
        <message>
            <source>Edit the summary</source>
            <translation>Editar el resumen</translation>
        </message>
        <message>
            <source>Summarise again</source>
            <translation>Resumir de nuevo</translation>
        </message>
        <message>
            <source>Send the turns again</source>
            <translation>Enviar los mensajes de nuevo</translation>
        </message>
        <message>
            <source>The model reads the turns themselves again, as far as they fit.</source>
            <translation>El modelo vuelve a leer los propios mensajes, en la medida en que quepan.</translation>
        </message>
        <message>
            <source>Hide the turns</source>
            <translation>Ocultar los mensajes</translation>
        </message>
        <message>
            <source>Show the turns</source>
            <translation>Mostrar los mensajes</translation>
        </message>
        <message>
            <source>Write a summary</source>
            <translation>Escribir un resumen</translation>
        </message>
        <message>
            <source>Summary of the earlier turns</source>
            <translation>Resumen de los mensajes anteriores</translation>
        </message>
        <message>
            <source>Summary of one earlier turn</source>
            <translation>Resumen de un mensaje anterior</translation>
        </message>
        <message numerus="yes">
            <source>Summary of {0} earlier turns</source>
            <translation>
                <numerusform>Resumen de {0} mensaje anterior</numerusform>
                <numerusform>Resumen de {0} mensajes anteriores</numerusform>
            </translation>
        </message>
        <message>
            <source>One earlier turn is left out</source>
            <translation>Se omite un mensaje anterior</translation>
        </message>
        <message numerus="yes">
            <source>{0} earlier turns are left out</source>
            <translation>
                <numerusform>Se omite {0} mensaje anterior</numerusform>
                <numerusform>Se omiten {0} mensajes anteriores</numerusform>
            </translation>
        </message>
        <message>
            <source>These turns were changed since the summary was made.</source>
            <translation>Estos mensajes cambiaron después de hacer el resumen.</translation>
        </message>
        <message>
            <source>The model reads nothing of them. They are kept, and can be sent again.</source>
            <translation>El modelo no lee nada de ellos. Se conservan y se pueden enviar de nuevo.</translation>
        </message>
        <message>
            <source>you</source>
            <translation>usted</translation>
        </message>
        <message>
            <source>The model reads this instead of the turns, which are kept. Written by {0}.</source>
            <translation>El modelo lee esto en lugar de los mensajes, que se conservan. Escrito por {0}.</translation>
        </message>
    </context>
    <context>
        <name>FolderChoice</name>
        <message>
            <source>Download folder</source>
            <translation>Carpeta de las descargas</translation>
        </message>
        <message>
            <source>Download to</source>
            <translation>Descargar en</translation>
        </message>
        <message>
            <source>Library</source>
            <translation>Biblioteca</translation>
        </message>
        <message>
            <source>not connected</source>
            <translation>no conectada</translation>
        </message>
        <message>
            <source>{0} free</source>
            <translation>{0} libres</translation>
        </message>
    </context>
    <context>
        <name>FoldersDialog</name>
        <message>
            <source>Model folders</source>
            <translation>Carpetas de modelos</translation>
        </message>
        <message>
            <source>Models in these folders are listed and used where they lie. The Models page asks which of them a download goes into. Those of LM Studio, Ollama, Jan, GPT4All and the hub's own cache are found automatically.</source>
            <translation>Los modelos de estas carpetas se muestran y se usan donde están. La página Modelos pregunta en cuál guardar una descarga. Las de LM Studio, Ollama, Jan, GPT4All y la caché del hub se encuentran automáticamente.</translation>
        </message>
        <message>
            <source>Add a folder…</source>
            <translation>Añadir una carpeta…</translation>
        </message>
        <message>
            <source>Remove from list</source>
            <translation>Quitar de la lista</translation>
        </message>
        <message>
            <source>Open</source>
            <translation>Abrir</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>Folder with models</source>
            <translation>Carpeta con modelos</translation>
        </message>
    </context>
    <context>
        <name>FormFoot</name>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>Start</source>
            <translation>Iniciar</translation>
        </message>
        <message>
            <source>Checking…</source>
            <translation>Comprobando…</translation>
        </message>
    </context>
    <context>
        <name>FoundList</name>
        <message>
            <source>Models to get</source>
            <translation>Modelos disponibles</translation>
        </message>
    </context>
    <context>
        <name>HelpMark</name>
        <message>
            <source>What is “{0}”?</source>
            <translation>¿Qué es «{0}»?</translation>
        </message>
    </context>
    <context>
        <name>HereCard</name>
        <message>
            <source>Already on this PC</source>
            <translation>Ya en este PC</translation>
        </message>
        <message>
            <source>One more is on the Models page.</source>
            <translation>Hay uno más en la página Modelos.</translation>
        </message>
        <message numerus="yes">
            <source>{0} more are on the Models page.</source>
            <translation>
                <numerusform>Hay {0} más en la página Modelos.</numerusform>
                <numerusform>Hay {0} más en la página Modelos.</numerusform>
            </translation>
        </message>
        <message>
            <source>Use</source>
            <translation>Usar</translation>
        </message>
        <message>
            <source>Use {0}</source>
            <translation>Usar {0}</translation>
        </message>
    </context>
    <context>
        <name>HubCard</name>
        <message>
            <source>Finding models</source>
            <translation>Búsqueda de modelos</translation>
        </message>
        <message>
            <source>Load from file…</source>
            <translation>Cargar desde archivo…</translation>
        </message>
        <message>
            <source>Catalogue of recommendations</source>
            <translation>Catálogo de recomendaciones</translation>
        </message>
        <message>
            <source>Asked instead of Hugging Face, also on the command line.</source>
            <translation>Se le pregunta en lugar de Hugging Face, también en la línea de comandos.</translation>
        </message>
        <message>
            <source>HF_ENDPOINT in the environment names {0}, which is used.</source>
            <translation>HF_ENDPOINT en el entorno indica {0}, que es lo que se usa.</translation>
        </message>
        <message>
            <source>Mirror of the hub</source>
            <translation>Réplica del hub</translation>
        </message>
        <message>
            <source>PyPI and PyTorch</source>
            <translation>PyPI y PyTorch</translation>
        </message>
        <message>
            <source>Where the engine of an installed Switchyard is fetched from instead.</source>
            <translation>De dónde se descarga en su lugar el motor de un Switchyard instalado.</translation>
        </message>
        <message>
            <source>Mirror of packages</source>
            <translation>Réplica de paquetes</translation>
        </message>
        <message>
            <source>the system's</source>
            <translation>el del sistema</translation>
        </message>
        <message>
            <source>For everything from the network; where it wants a login, as http://NAME:PASSWORD@HOST:PORT.</source>
            <translation>Para todo lo que viene de la red; si exige iniciar sesión, como http://NAME:PASSWORD@HOST:PORT.</translation>
        </message>
        <message>
            <source>Proxy</source>
            <translation>Proxy</translation>
        </message>
        <message>
            <source>None is kept. One is asked for when a model needs it.</source>
            <translation>No hay ninguno guardado. Se pide cuando un modelo lo necesita.</translation>
        </message>
        <message>
            <source>In the system's keyring, or for this run only where there is none.</source>
            <translation>En el llavero del sistema o, si no lo hay, solo durante esta ejecución.</translation>
        </message>
        <message>
            <source>Access tokens</source>
            <translation>Tokens de acceso</translation>
        </message>
        <message>
            <source>A newer catalogue</source>
            <translation>Un catálogo más reciente</translation>
        </message>
        <message>
            <source>Catalogues (*.json)</source>
            <translation>Catálogos (*.json)</translation>
        </message>
        <message>
            <source>{0} models, as of {1}.</source>
            <translation>{0} modelos, a fecha de {1}.</translation>
        </message>
        <message>
            <source>The token of another program is still used for {0}: see “hf auth logout”, or HF_TOKEN.</source>
            <translation>Para {0} se sigue usando el token de otro programa: véase «hf auth logout» o HF_TOKEN.</translation>
        </message>
    </context>
    <context>
        <name>InputCard</name>
        <message>
            <source>Another file…</source>
            <translation>Otro archivo…</translation>
        </message>
        <message>
            <source>First rows of the file</source>
            <translation>Primeras filas del archivo</translation>
        </message>
        <message>
            <source>Encoding</source>
            <translation>Codificación</translation>
        </message>
        <message>
            <source>Encoding: automatic</source>
            <translation>Codificación: automática</translation>
        </message>
        <message>
            <source>Separator</source>
            <translation>Separador</translation>
        </message>
        <message>
            <source>Separator: automatic</source>
            <translation>Separador: automático</translation>
        </message>
        <message>
            <source>tab</source>
            <translation>tabulador</translation>
        </message>
        <message>
            <source>Sheet</source>
            <translation>Hoja</translation>
        </message>
        <message>
            <source>A text file is one row</source>
            <translation>Un archivo de texto es una fila</translation>
        </message>
        <message>
            <source>Otherwise each line is a row</source>
            <translation>Si no, cada línea es una fila</translation>
        </message>
        <message>
            <source>Reading the file…</source>
            <translation>Leyendo el archivo…</translation>
        </message>
        <message>
            <source>An OpenAI batch file: rows have their own messages and settings; answers are in OpenAI's format.</source>
            <translation>Un archivo batch de OpenAI: las filas tienen sus propios mensajes y ajustes; las respuestas van en el formato de OpenAI.</translation>
        </message>
        <message>
            <source>Sheet: {0}</source>
            <translation>Hoja: {0}</translation>
        </message>
        <message>
            <source>Some rows are not valid text in this encoding: choose another below the table.</source>
            <translation>Algunas filas no son texto válido en esta codificación: elija otra debajo de la tabla.</translation>
        </message>
        <message>
            <source>Some of the first rows cannot be answered: one {0}.</source>
            <translation>Algunas de las primeras filas no se pueden responder. Una de ellas: {0}.</translation>
        </message>
        <message>
            <source>1 column</source>
            <translation>1 columna</translation>
        </message>
        <message numerus="yes">
            <source>{0} columns</source>
            <translation>
                <numerusform>{0} columna</numerusform>
                <numerusform>{0} columnas</numerusform>
            </translation>
        </message>
        <message>
            <source>1 row</source>
            <translation>1 fila</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows</source>
            <translation>
                <numerusform>{0} fila</numerusform>
                <numerusform>{0} filas</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>Installation</name>
        <message>
            <source>The installation could not be started: install Switchyard again.</source>
            <translation>No se pudo iniciar la instalación: instale Switchyard de nuevo.</translation>
        </message>
    </context>
    <context>
        <name>JobDelegate</name>
        <message>
            <source>{0} failed</source>
            <translation>{0} con error</translation>
        </message>
    </context>
    <context>
        <name>JobStrip</name>
        <message>
            <source>Jobs</source>
            <translation>Tareas</translation>
        </message>
    </context>
    <context>
        <name>Kept</name>
        <message>
            <source>{0} was damaged; it is kept as {1}, and a new one is begun.</source>
            <translation>{0} estaba dañado; se conserva como {1} y se empieza uno nuevo.</translation>
        </message>
        <message>
            <source>{0} could not be read ({1}): what you keep now is lost when the window closes.</source>
            <translation>No se pudo leer {0} ({1}): lo que guarde ahora se perderá al cerrar la ventana.</translation>
        </message>
        <message>
            <source>{0} could not be saved ({1}); free some space or check its permissions.</source>
            <translation>No se pudo guardar {0} ({1}); libere espacio o compruebe los permisos.</translation>
        </message>
    </context>
    <context>
        <name>KeptCard</name>
        <message>
            <source>Continuing chats</source>
            <translation>Continuación de chats</translation>
        </message>
        <message>
            <source>Clear</source>
            <translation>Vaciar</translation>
        </message>
        <message>
            <source>Clear kept context</source>
            <translation>Eliminar el contexto guardado</translation>
        </message>
        <message>
            <source>Now</source>
            <translation>Ahora</translation>
        </message>
        <message>
            <source>{0} of all chats and models together.</source>
            <translation>{0} de todos los chats y modelos juntos.</translation>
        </message>
        <message>
            <source>Nothing is kept.</source>
            <translation>No hay nada guardado.</translation>
        </message>
        <message>
            <source>The folder cannot be changed: {0}</source>
            <translation>No se puede cambiar la carpeta: {0}</translation>
        </message>
    </context>
    <context>
        <name>Lane</name>
        <message>
            <source>Phase</source>
            <translation>Fase</translation>
        </message>
        <message>
            <source>What the model is doing: reading a prompt (prefill), writing an answer token by token (decode), or a batch step, which takes many rows through the model at once. Each tick is a token: a word or a part of one.</source>
            <translation>Lo que hace el modelo: leer un prompt (prellenado), escribir una respuesta token a token (decodificación) o un paso de lotes, que pasa muchas filas a la vez por el modelo. Cada marca es un token: una palabra o parte de ella.</translation>
        </message>
        <message>
            <source>Requests</source>
            <translation>Peticiones</translation>
        </message>
        <message>
            <source>A row for each answer that is being worked on, for this window or other programs, here or at another server: waiting (hatched), its prompt being read (pale), its answer being written. A batch job has a row, too (outlined).</source>
            <translation>Una fila por cada respuesta en curso, para esta ventana u otros programas, aquí o en otro servidor: en espera (rayado), leyendo su prompt (pálido), escribiendo su respuesta. Una tarea por lotes también tiene su fila (con borde).</translation>
        </message>
        <message>
            <source>Sweeps</source>
            <translation>Pasadas</translation>
        </message>
        <message>
            <source>What goes through the layers together: one token of each answer that is being written, and (hatched) pieces of prompts that are being read. Batch jobs have sweeps of their own. From close up each sweep is a block with its tokens.</source>
            <translation>Lo que pasa junto por las capas: un token de cada respuesta que se escribe y (rayados) trozos de prompts que se leen. Las tareas por lotes tienen sus propias pasadas. De cerca, cada pasada es un bloque con sus tokens.</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>How busy the graphics card is with our model. In gaps it waits for something else, usually for weights or for the processor.</source>
            <translation>Cuánto ocupa nuestro modelo la tarjeta gráfica. En los huecos espera otra cosa, normalmente pesos o el procesador.</translation>
        </message>
        <message>
            <source>computing on the GPU</source>
            <translation>cálculo en la GPU</translation>
        </message>
        <message>
            <source>To the GPU</source>
            <translation>A la GPU</translation>
        </message>
        <message>
            <source>Weights being copied from RAM to the graphics card. This is the cost of a miss: an expert that is needed but not in the card's memory.</source>
            <translation>Pesos que se copian de la RAM a la tarjeta gráfica. Es el coste de un fallo: un experto que se necesita y no está en la memoria de la tarjeta.</translation>
        </message>
        <message>
            <source>copying weights to the GPU</source>
            <translation>copia de pesos a la GPU</translation>
        </message>
        <message>
            <source>to the GPU</source>
            <translation>a la GPU</translation>
        </message>
        <message>
            <source>passing results to the GPU</source>
            <translation>paso de resultados a la GPU</translation>
        </message>
        <message>
            <source>results</source>
            <translation>resultados</translation>
        </message>
        <message>
            <source>From the GPU</source>
            <translation>De la GPU</translation>
        </message>
        <message>
            <source>Copies from the graphics card to RAM, mostly small results. Large amounts are a batch's data that has no room on the card.</source>
            <translation>Copias de la tarjeta gráfica a la RAM, sobre todo resultados pequeños. Las grandes cantidades son datos de un lote que no caben en la tarjeta.</translation>
        </message>
        <message>
            <source>copying from the GPU</source>
            <translation>copia desde la GPU</translation>
        </message>
        <message>
            <source>from the GPU</source>
            <translation>de la GPU</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>How busy the processor is with our model: with experts, the parts of a layer of which each token uses only a few, and with attention, which looks back at the text so far. Together they can fill the lane.</source>
            <translation>Cuánto ocupa nuestro modelo el procesador: con los expertos, las partes de una capa de las que cada token usa pocas, y con la atención, que vuelve la vista al texto anterior. Juntos pueden llenar la pista.</translation>
        </message>
        <message>
            <source>computing experts on the CPU</source>
            <translation>cálculo de expertos en la CPU</translation>
        </message>
        <message>
            <source>CPU experts</source>
            <translation>expertos en CPU</translation>
        </message>
        <message>
            <source>attention and other layers on the CPU</source>
            <translation>atención y otras capas en la CPU</translation>
        </message>
        <message>
            <source>CPU attention</source>
            <translation>atención en CPU</translation>
        </message>
        <message>
            <source>Pictures</source>
            <translation>Imágenes</translation>
        </message>
        <message>
            <source>Pictures being turned into tokens by the part of the model that sees, on the graphics card or the processor. Each is read once: the next question about it begins at once.</source>
            <translation>Imágenes que la parte del modelo que ve convierte en tokens, en la tarjeta gráfica o en el procesador. Cada una se lee una vez: la siguiente pregunta sobre ella empieza de inmediato.</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>lectura de imágenes</translation>
        </message>
        <message>
            <source>pictures</source>
            <translation>imágenes</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Disco</translation>
        </message>
        <message>
            <source>Experts being read from disk because RAM has no room for them. If this lane is often full, more RAM or a lower precision helps most.</source>
            <translation>Expertos que se leen del disco porque no caben en la RAM. Si esta pista está llena a menudo, lo que más ayuda es más RAM o menos precisión.</translation>
        </message>
        <message>
            <source>reading from disk</source>
            <translation>lectura del disco</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>disco</translation>
        </message>
        <message>
            <source>Experts</source>
            <translation>Expertos</translation>
        </message>
        <message>
            <source>Where the needed experts were: in the card's memory (a hit), copied there first (fetched, a miss), or computed on the processor instead. More hits mean less waiting; without a graphics card everything is computed on the processor.</source>
            <translation>Dónde estaban los expertos necesarios: en la memoria de la tarjeta (un acierto), copiados antes a ella (traídos, un fallo) o calculados en el procesador. Más aciertos son menos espera; sin tarjeta gráfica, todo se calcula en el procesador.</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>Tokens/s</translation>
        </message>
        <message>
            <source>How many tokens per second are written while the model is working. For a batch this counts the tokens of all rows, including their prompts.</source>
            <translation>Cuántos tokens por segundo se escriben mientras trabaja el modelo. En un lote se cuentan los tokens de todas las filas, con sus prompts.</translation>
        </message>
        <message>
            <source>GPU busy</source>
            <translation>Carga GPU</translation>
        </message>
        <message>
            <source>How busy the graphics card is, for all programs.</source>
            <translation>Cuánto ocupan la tarjeta gráfica todos los programas.</translation>
        </message>
        <message>
            <source>CPU busy</source>
            <translation>Carga CPU</translation>
        </message>
        <message>
            <source>How busy the whole processor is: filled for Switchyard, dashed for all programs. A wide gap between the two is what other programs use.</source>
            <translation>Cuán ocupado está todo el procesador: relleno para Switchyard, discontinuo para todos los programas. La distancia entre ambos es lo que usan los demás.</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Memory in use: filled for Switchyard, dashed for all programs.</source>
            <translation>Memoria en uso: relleno para Switchyard, discontinuo para todos los programas.</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>The card's memory in use: filled for Switchyard, dashed for all programs.</source>
            <translation>Memoria de la tarjeta en uso: relleno para Switchyard, discontinuo para todos los programas.</translation>
        </message>
        <message>
            <source>PCIe</source>
            <translation>PCIe</translation>
        </message>
        <message>
            <source>Traffic on the graphics card's slot, both ways, of all programs.</source>
            <translation>Tráfico de la ranura de la tarjeta gráfica, en ambos sentidos, de todos los programas.</translation>
        </message>
        <message>
            <source>Page faults</source>
            <translation>Fallos de página</translation>
        </message>
        <message>
            <source>Memory pages that the system had to map first: many slow things down.</source>
            <translation>Páginas de memoria que el sistema tuvo que asignar antes: si son muchas, ralentizan.</translation>
        </message>
        <message>
            <source>Disk I/O</source>
            <translation>Disco</translation>
        </message>
        <message>
            <source>Reads from the disk and (dashed) writes to it, of all programs.</source>
            <translation>Lecturas del disco y (discontinuo) escrituras, de todos los programas.</translation>
        </message>
        <message>
            <source>GPU power</source>
            <translation>Potencia GPU</translation>
        </message>
        <message>
            <source>The power that the graphics card draws.</source>
            <translation>La potencia que consume la tarjeta gráfica.</translation>
        </message>
        <message>
            <source>CPU power</source>
            <translation>Potencia CPU</translation>
        </message>
        <message>
            <source>The power that the processor draws.</source>
            <translation>La potencia que consume el procesador.</translation>
        </message>
        <message>
            <source>GPU clock</source>
            <translation>Frecuencia GPU</translation>
        </message>
        <message>
            <source>The graphics card's clock rate: it falls when the card is too hot.</source>
            <translation>La frecuencia de la tarjeta gráfica: baja cuando está demasiado caliente.</translation>
        </message>
        <message>
            <source>CPU clock</source>
            <translation>Frecuencia CPU</translation>
        </message>
        <message>
            <source>The processor's clock rate: it falls when too hot or saving power.</source>
            <translation>La frecuencia del procesador: baja si está demasiado caliente o ahorra energía.</translation>
        </message>
        <message>
            <source>GPU heat</source>
            <translation>Temperatura GPU</translation>
        </message>
        <message>
            <source>How hot the graphics card is.</source>
            <translation>La temperatura de la tarjeta gráfica.</translation>
        </message>
        <message>
            <source>CPU heat</source>
            <translation>Temperatura CPU</translation>
        </message>
        <message>
            <source>How hot the processor is.</source>
            <translation>La temperatura del procesador.</translation>
        </message>
    </context>
    <context>
        <name>Languages</name>
        <message>
            <source>Switchyard does not speak {0} yet, so it is in English. Settings has its languages.</source>
            <translation>Switchyard aún no habla {0}, así que está en inglés. Los idiomas disponibles están en la configuración.</translation>
        </message>
    </context>
    <context>
        <name>LicencesDialog</name>
        <message>
            <source>Licences</source>
            <translation>Licencias</translation>
        </message>
    </context>
    <context>
        <name>Loading</name>
        <message>
            <source>Opening the model</source>
            <translation>Abriendo el modelo</translation>
        </message>
        <message>
            <source>Reading weights</source>
            <translation>Leyendo los pesos</translation>
        </message>
        <message>
            <source>Converting weights; later starts skip this</source>
            <translation>Convirtiendo los pesos, solo esta vez</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>Cargando el modelo</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} de {1}</translation>
        </message>
        <message>
            <source>{0} left</source>
            <translation>faltan {0}</translation>
        </message>
    </context>
    <context>
        <name>MachineCard</name>
        <message>
            <source>Machine</source>
            <translation>Máquina</translation>
        </message>
        <message>
            <source>Sensor and driver data of the whole machine, other programs included. If the processor is much busier than our share of it, other programs are slowing the model down.</source>
            <translation>Datos de sensores y controladores de toda la máquina, incluidos otros programas. Si el procesador está mucho más ocupado que nuestra parte, otros programas frenan el modelo.</translation>
        </message>
        <message>
            <source>from sensors and drivers</source>
            <translation>de sensores y controladores</translation>
        </message>
        <message>
            <source>Graphics card: no sensor data</source>
            <translation>Tarjeta gráfica: sin datos de sensores</translation>
        </message>
        <message>
            <source>No sensor data yet.</source>
            <translation>Aún no hay datos de sensores.</translation>
        </message>
        <message>
            <source>CPU {0}%</source>
            <translation>CPU {0} %</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>ours {0}%</source>
            <translation>nuestro {0} %</translation>
        </message>
        <message>
            <source>{0} GHz</source>
            <translation>{0} GHz</translation>
        </message>
        <message>
            <source>{0} °C</source>
            <translation>{0} °C</translation>
        </message>
        <message>
            <source>power not available</source>
            <translation>consumo no disponible</translation>
        </message>
        <message>
            <source>{0} W</source>
            <translation>{0} W</translation>
        </message>
        <message>
            <source>Disk {0} MB/s read, {1} MB/s written</source>
            <translation>Disco: {0} MB/s leídos, {1} MB/s escritos</translation>
        </message>
        <message>
            <source>{0}% busy</source>
            <translation>ocupado al {0} %</translation>
        </message>
        <message>
            <source>page faults {0}/s, {1}/s from disk</source>
            <translation>fallos de página {0}/s, {1}/s desde disco</translation>
        </message>
    </context>
    <context>
        <name>MachineFooter</name>
        <message>
            <source>Memory</source>
            <translation>Memoria</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>No GPU in use</source>
            <translation>No se usa ninguna GPU</translation>
        </message>
        <message>
            <source>Show what holds the memory</source>
            <translation>Mostrar qué ocupa la memoria</translation>
        </message>
        <message>
            <source>Fold the memory into one bar</source>
            <translation>Plegar la memoria en una barra</translation>
        </message>
        <message>
            <source>Model: the weights that every token needs. Its experts: those of which each token needs a few. Chat memory: keys and values of conversations (KV). These figures are the engine's; RAM in use and in all are the operating system's.</source>
            <translation>Modelo: los pesos que necesita cada token. Sus expertos: aquellos de los que cada token necesita unos pocos. Memoria del chat: claves y valores de las conversaciones (KV). Estas cifras son del motor; la RAM usada y total, del sistema operativo.</translation>
        </message>
        <message>
            <source>VRAM in use and total: from the driver.</source>
            <translation>VRAM usada y total: del controlador.</translation>
        </message>
        <message>
            <source>Memory of the emulated graphics card: from the engine.</source>
            <translation>Memoria de la tarjeta gráfica emulada: del motor.</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modelo</translation>
        </message>
        <message>
            <source>Its experts</source>
            <translation>Sus expertos</translation>
        </message>
        <message>
            <source>Chat memory</source>
            <translation>Memoria del chat</translation>
        </message>
        <message>
            <source>Switchyard</source>
            <translation>Switchyard</translation>
        </message>
        <message>
            <source>Other programs</source>
            <translation>Otros programas</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 núcleo</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} núcleo</numerusform>
                <numerusform>{0} núcleos</numerusform>
            </translation>
        </message>
        <message>
            <source>{0}, not in use</source>
            <translation>{0}, no se usa</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 hilo</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} hilo</numerusform>
                <numerusform>{0} hilos</numerusform>
            </translation>
        </message>
        <message>
            <source>tuned</source>
            <translation>optimizado</translation>
        </message>
        <message>
            <source>Where the model runs, as reported by the engine.</source>
            <translation>Dónde se ejecuta el modelo, según el motor.</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>Cargando el modelo</translation>
        </message>
        <message>
            <source>Loading the model, {0}%</source>
            <translation>Cargando el modelo, {0} %</translation>
        </message>
        <message>
            <source>Starting the engine</source>
            <translation>Iniciando el motor</translation>
        </message>
        <message>
            <source>No model loaded</source>
            <translation>Ningún modelo cargado</translation>
        </message>
    </context>
    <context>
        <name>MachinePicture</name>
        <message>
            <source>Picture of this machine</source>
            <translation>Esquema de esta máquina</translation>
        </message>
    </context>
    <context>
        <name>MainWindow</name>
        <message>
            <source>Switchyard {0} is available: get it in Settings.</source>
            <translation>Ya está disponible Switchyard {0}: consígalo en Configuración.</translation>
        </message>
        <message>
            <source>Everywhere</source>
            <translation>En todas partes</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Copiado</translation>
        </message>
        <message>
            <source>The report is in {0}.</source>
            <translation>El informe está en {0}.</translation>
        </message>
        <message>
            <source>Copy report</source>
            <translation>Copiar informe</translation>
        </message>
        <message>
            <source>Save report…</source>
            <translation>Guardar informe…</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>Switchyard hit an error last time. You can copy a report of it, or save one with versions, hardware and logs; neither has prompts, answers or names, and nothing was sent.</source>
            <translation>Switchyard tuvo un error la última vez. Puede copiar un informe de él, o guardar uno con versiones, hardware y registros; ninguno contiene prompts, respuestas ni nombres, y no se ha enviado nada.</translation>
        </message>
        <message>
            <source>{0} Your text is kept.</source>
            <translation>{0} Su texto se conserva.</translation>
        </message>
        <message>
            <source>Your hardware has changed since the last tuning. {0}</source>
            <translation>Su hardware ha cambiado desde la última optimización. {0}</translation>
        </message>
        <message>
            <source>{0} now runs at {1} tokens/s, much faster than the {2} that Tune measured: the machine was busy then. Tune again to find the best settings.</source>
            <translation>{0} funciona ahora a {1} tokens/s, mucho más rápido que los {2} que midió Optimizar: la máquina estaba ocupada entonces. Optimice de nuevo para encontrar los mejores ajustes.</translation>
        </message>
        <message>
            <source>The graphics card works again, but the model still runs on the CPU: reload it to use the card.</source>
            <translation>La tarjeta gráfica vuelve a funcionar, pero el modelo sigue en la CPU: recárguelo para usar la tarjeta.</translation>
        </message>
        <message>
            <source>Restart engine</source>
            <translation>Reiniciar el motor</translation>
        </message>
        <message>
            <source>Models</source>
            <translation>Modelos</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>Optimizar</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>Recargar modelo</translation>
        </message>
        <message>
            <source>Show these shortcuts</source>
            <translation>Mostrar estos atajos</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>Salir</translation>
        </message>
    </context>
    <context>
        <name>MakingRoom</name>
        <message>
            <source>A batch job is running.</source>
            <translation>Hay una tarea por lotes en curso.</translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself, so the job is paused and resumes when tuning ends. No answered row is lost.</source>
            <translation>La optimización necesita el motor para ella sola, así que la tarea se pausa y se reanuda al terminar. No se pierde ninguna fila respondida.</translation>
        </message>
        <message>
            <source>Pause it and tune</source>
            <translation>Pausarla y optimizar</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>Hay {0} tarea por lotes en curso.</numerusform>
                <numerusform>Hay {0} tareas por lotes en curso.</numerusform>
            </translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself, so the jobs are paused and resume when tuning ends. No answered row is lost.</source>
            <translation>La optimización necesita el motor para ella sola, así que las tareas se pausan y se reanudan al terminar. No se pierde ninguna fila respondida.</translation>
        </message>
        <message>
            <source>Pause them and tune</source>
            <translation>Pausarlas y optimizar</translation>
        </message>
        <message>
            <source>An answer is being written.</source>
            <translation>Se está escribiendo una respuesta.</translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself. A stopped answer keeps its text so far.</source>
            <translation>La optimización necesita el motor para ella sola. Una respuesta detenida conserva su texto hasta ese punto.</translation>
        </message>
        <message>
            <source>Tune after the answer</source>
            <translation>Optimizar tras la respuesta</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>Detener la respuesta</translation>
        </message>
        <message>
            <source>The batch job for {0} stays paused: it began in {1}, and the model now runs in {2}. “Keep as before” lets you resume it.</source>
            <translation>La tarea por lotes de {0} sigue en pausa: empezó en {1} y el modelo funciona ahora en {2}. «Dejar como antes» permite reanudarla.</translation>
        </message>
    </context>
    <context>
        <name>MapLegend</name>
        <message>
            <source>Recent uses: each counts half as much after 128 tokens</source>
            <translation>Usos recientes: pasados 128 tokens, cada uno cuenta la mitad</translation>
        </message>
        <message>
            <source>in VRAM</source>
            <translation>en VRAM</translation>
        </message>
        <message>
            <source>in RAM</source>
            <translation>en RAM</translation>
        </message>
        <message>
            <source>only on disk</source>
            <translation>solo en disco</translation>
        </message>
        <message>
            <source>fetching</source>
            <translation>trayendo</translation>
        </message>
        <message>
            <source>Dark to yellow: 0 to {0} recent uses</source>
            <translation>De oscuro a amarillo: 0 a {0} usos recientes</translation>
        </message>
        <message>
            <source>recent uses 0</source>
            <translation>usos recientes 0</translation>
        </message>
    </context>
    <context>
        <name>MemoryCard</name>
        <message>
            <source>Memory</source>
            <translation>Memoria</translation>
        </message>
        <message>
            <source>What fills the computer's memory and its graphics card's. Weights and experts are the model itself; KV (keys and values) is what it remembers of the conversation, and grows with its length. Kept context is that of other conversations, which go on at once with it.</source>
            <translation>Lo que llena la memoria del equipo y la de su tarjeta gráfica. Los pesos y los expertos son el propio modelo; KV (claves y valores) es lo que recuerda de la conversación, y crece con ella. El contexto guardado es el de otras conversaciones, que así continúan al instante.</translation>
        </message>
        <message>
            <source>Shows a model's memory once one is loaded.</source>
            <translation>Muestra la memoria de un modelo cuando hay uno cargado.</translation>
        </message>
        <message>
            <source>Parts of the model: counted by the engine. Total RAM: reported by the system.</source>
            <translation>Partes del modelo: contadas por el motor. RAM total: según el sistema.</translation>
        </message>
        <message>
            <source>Computed context of chats, of all models, of what it may take (see Settings).</source>
            <translation>Contexto calculado de los chats, de todos los modelos, respecto a lo que puede ocupar (véase Configuración).</translation>
        </message>
        <message>
            <source>Counted by the engine, of the memory it may use.</source>
            <translation>Contado por el motor, respecto a la memoria que puede usar.</translation>
        </message>
        <message>
            <source>free</source>
            <translation>libre</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Disco</translation>
        </message>
        <message>
            <source>VRAM (emulated)</source>
            <translation>VRAM (emulada)</translation>
        </message>
        <message>
            <source>VRAM {0}</source>
            <translation>VRAM {0}</translation>
        </message>
        <message>
            <source>weights</source>
            <translation>pesos</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>expertos</translation>
        </message>
        <message>
            <source>conversation (KV)</source>
            <translation>conversación (KV)</translation>
        </message>
        <message>
            <source>kept context</source>
            <translation>contexto guardado</translation>
        </message>
        <message>
            <source>staging</source>
            <translation>búferes de transferencia</translation>
        </message>
        <message>
            <source>activations</source>
            <translation>activaciones</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>lectura de imágenes</translation>
        </message>
        <message>
            <source>the engine itself</source>
            <translation>el propio motor</translation>
        </message>
        <message>
            <source>window and other programs</source>
            <translation>ventana y otros programas</translation>
        </message>
    </context>
    <context>
        <name>MessageEditor</name>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Guardar</translation>
        </message>
        <message>
            <source>Ctrl+Enter</source>
            <translation>Ctrl+Intro</translation>
        </message>
    </context>
    <context>
        <name>MessageTools</name>
        <message>
            <source>Saved prompts  /</source>
            <translation>Prompts guardados  /</translation>
        </message>
        <message>
            <source>More for this message</source>
            <translation>Más para este mensaje</translation>
        </message>
        <message>
            <source>Saved prompts…	/</source>
            <translation>Prompts guardados…	/</translation>
        </message>
        <message>
            <source>Save this message as a prompt…</source>
            <translation>Guardar este mensaje como prompt…</translation>
        </message>
        <message>
            <source>Ask two, side by side…	Ctrl+Shift+D</source>
            <translation>Preguntar a dos, en paralelo…	Ctrl+Mayús+D</translation>
        </message>
        <message>
            <source>Ask this of every row of a file…</source>
            <translation>Preguntar esto a cada fila de un archivo…</translation>
        </message>
    </context>
    <context>
        <name>MissRatioPlot</name>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>no room</source>
            <translation>sin sitio</translation>
        </message>
        <message>
            <source>Miss-ratio curve</source>
            <translation>Curva de fallos</translation>
        </message>
        <message>
            <source>Drag the handle to resize the cache. Hatched: more than the free memory.</source>
            <translation>Arrastre el tirador para cambiar el tamaño de la caché. Rayado: más que la memoria libre.</translation>
        </message>
        <message>
            <source>{0} experts</source>
            <translation>{0} expertos</translation>
        </message>
        <message>
            <source>hits about {0}%</source>
            <translation>aciertos aprox. {0} %</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>Left and right move the handle, Enter resizes the cache, Escape resets the handle.</source>
            <translation>Izquierda y derecha mueven el tirador, Intro cambia el tamaño de la caché, Esc restablece el tirador.</translation>
        </message>
        <message>
            <source>experts kept, of {0}</source>
            <translation>expertos guardados, de {0}</translation>
        </message>
        <message>
            <source>hits, expected</source>
            <translation>aciertos, esperados</translation>
        </message>
        <message>
            <source>LRU</source>
            <translation>LRU</translation>
        </message>
        <message>
            <source>tokens/s, predicted</source>
            <translation>tokens/s, previstos</translation>
        </message>
        <message>
            <source>too few tokens for a curve</source>
            <translation>muy pocos tokens para una curva</translation>
        </message>
        <message>
            <source>now</source>
            <translation>ahora</translation>
        </message>
    </context>
    <context>
        <name>ModelCard</name>
        <message>
            <source>Tune…</source>
            <translation>Optimizar…</translation>
        </message>
        <message>
            <source>Speed</source>
            <translation>Velocidad</translation>
        </message>
        <message>
            <source>Times this machine and keeps the fastest settings.</source>
            <translation>Cronometra esta máquina y conserva los ajustes más rápidos.</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Modelo inicial</translation>
        </message>
    </context>
    <context>
        <name>ModelDialog</name>
        <message>
            <source>Models (*.gguf *.safetensors config.json)</source>
            <translation>Modelos (*.gguf *.safetensors config.json)</translation>
        </message>
        <message>
            <source>Open a model file</source>
            <translation>Abrir un archivo de modelo</translation>
        </message>
    </context>
    <context>
        <name>ModelPicker</name>
        <message>
            <source>Models</source>
            <translation>Modelos</translation>
        </message>
        <message>
            <source>Find a model</source>
            <translation>Buscar un modelo</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>Cargando el modelo</translation>
        </message>
        <message>
            <source>Cancel loading</source>
            <translation>Cancelar la carga</translation>
        </message>
        <message>
            <source>Set as default</source>
            <translation>Establecer como predeterminado</translation>
        </message>
        <message>
            <source>Open a model file…</source>
            <translation>Abrir un archivo de modelo…</translation>
        </message>
        <message>
            <source>Get more models…</source>
            <translation>Obtener más modelos…</translation>
        </message>
        <message>
            <source>Up, Down, Enter</source>
            <translation>Arriba, Abajo, Intro</translation>
        </message>
        <message>
            <source>Choose a model in the list, and load it</source>
            <translation>Elegir un modelo de la lista y cargarlo</translation>
        </message>
        <message>
            <source>Remote servers</source>
            <translation>Servidores remotos</translation>
        </message>
        <message>
            <source>No model is on this PC yet.</source>
            <translation>Aún no hay ningún modelo en este PC.</translation>
        </message>
        <message>
            <source>Looking for models…</source>
            <translation>Buscando modelos…</translation>
        </message>
        <message>
            <source>No model has that name.</source>
            <translation>Ningún modelo se llama así.</translation>
        </message>
        <message>
            <source>Use in this chat</source>
            <translation>Usar en este chat</translation>
        </message>
        <message>
            <source>Unload</source>
            <translation>Descargar de memoria</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>Cargar</translation>
        </message>
        <message>
            <source>Frees the memory that the model takes</source>
            <translation>Libera la memoria que ocupa el modelo</translation>
        </message>
        <message>
            <source>Use in new chats</source>
            <translation>Usar en chats nuevos</translation>
        </message>
        <message>
            <source>New chats begin with it; chats that are there stay as they are</source>
            <translation>Los chats nuevos empiezan con él; los que ya existen siguen como están</translation>
        </message>
        <message>
            <source>Loaded whenever Switchyard starts</source>
            <translation>Se carga cada vez que se inicia Switchyard</translation>
        </message>
    </context>
    <context>
        <name>ModelTable</name>
        <message>
            <source>Load the model</source>
            <translation>Cargar el modelo</translation>
        </message>
        <message>
            <source>Remove the model</source>
            <translation>Quitar el modelo</translation>
        </message>
    </context>
    <context>
        <name>Models</name>
        <message>
            <source>Switchyard</source>
            <translation>Switchyard</translation>
        </message>
        <message>
            <source>Hub cache</source>
            <translation>Caché del hub</translation>
        </message>
        <message>
            <source>Your folder</source>
            <translation>Su carpeta</translation>
        </message>
        <message>
            <source>also in {0}</source>
            <translation>también en {0}</translation>
        </message>
        <message>
            <source>damaged</source>
            <translation>dañado</translation>
        </message>
        <message>
            <source>{0} tokens/s measured</source>
            <translation>{0} tokens/s medidos</translation>
        </message>
        <message>
            <source>about {0} tokens/s predicted</source>
            <translation>unos {0} tokens/s previstos</translation>
        </message>
        <message>
            <source>never</source>
            <translation>nunca</translation>
        </message>
        <message>
            <source>today</source>
            <translation>hoy</translation>
        </message>
        <message>
            <source>yesterday</source>
            <translation>ayer</translation>
        </message>
        <message numerus="yes">
            <source>{0} days ago</source>
            <translation>
                <numerusform>hace {0} día</numerusform>
                <numerusform>hace {0} días</numerusform>
            </translation>
        </message>
        <message>
            <source>loaded</source>
            <translation>cargado</translation>
        </message>
        <message>
            <source>default</source>
            <translation>predeterminado</translation>
        </message>
        <message>
            <source>pictures</source>
            <translation>imágenes</translation>
        </message>
        <message>
            <source>tools</source>
            <translation>herramientas</translation>
        </message>
        <message>
            <source>thinks</source>
            <translation>razona</translation>
        </message>
        <message>
            <source>embeddings</source>
            <translation>embeddings</translation>
        </message>
        <message>
            <source>Sees pictures</source>
            <translation>Ve imágenes</translation>
        </message>
        <message>
            <source>Calls tools</source>
            <translation>Llama a herramientas</translation>
        </message>
        <message>
            <source>Thinks first</source>
            <translation>Piensa primero</translation>
        </message>
        <message>
            <source>Embeds texts</source>
            <translation>Crea embeddings de textos</translation>
        </message>
        <message>
            <source>last used: {0}</source>
            <translation>último uso: {0}</translation>
        </message>
        <message>
            <source>{0} B parameters</source>
            <translation>{0} mil M de parámetros</translation>
        </message>
        <message>
            <source>{0} experts, {1} per token</source>
            <translation>{0} expertos, {1} por token</translation>
        </message>
        <message>
            <source>context {0}</source>
            <translation>contexto {0}</translation>
        </message>
        <message>
            <source>used {0}</source>
            <translation>usado: {0}</translation>
        </message>
        <message>
            <source>converted weights {0}</source>
            <translation>pesos convertidos {0}</translation>
        </message>
        <message>
            <source>Verifying {0}</source>
            <translation>Verificando {0}</translation>
        </message>
        <message>
            <source>Moving {0}</source>
            <translation>Moviendo {0}</translation>
        </message>
        <message>
            <source>Copying {0}</source>
            <translation>Copiando {0}</translation>
        </message>
        <message>
            <source>Importing {0}</source>
            <translation>Importando {0}</translation>
        </message>
        <message>
            <source>Removing {0}</source>
            <translation>Quitando {0}</translation>
        </message>
        <message>
            <source>Deleting the converted weights of {0}</source>
            <translation>Eliminando los pesos convertidos de {0}</translation>
        </message>
        <message>
            <source>{0} was imported.</source>
            <translation>Se importó {0}.</translation>
        </message>
        <message>
            <source>{0} is now in {1}.</source>
            <translation>{0} está ahora en {1}.</translation>
        </message>
        <message>
            <source>{0} was copied to {1}.</source>
            <translation>{0} se copió a {1}.</translation>
        </message>
        <message>
            <source>{0} is in the trash ({1}).</source>
            <translation>{0} está en la papelera ({1}).</translation>
        </message>
        <message>
            <source>Everything else in {0} stays there.</source>
            <translation>Lo demás que hay en {0} se queda ahí.</translation>
        </message>
        <message>
            <source>{0} were freed; loading {1} converts its weights again.</source>
            <translation>Se liberaron {0}; al cargar {1} se convierten de nuevo sus pesos.</translation>
        </message>
        <message>
            <source>{0} is damaged, download it again: {1}</source>
            <translation>{0} está dañado, descárguelo de nuevo: {1}</translation>
        </message>
        <message>
            <source>{0} is intact: every file has its checksum.</source>
            <translation>{0} está intacto: cada archivo tiene su suma de verificación.</translation>
        </message>
        <message>
            <source>{0} is complete; there are no checksums to compare with.</source>
            <translation>{0} está completo; no hay sumas de verificación con las que comparar.</translation>
        </message>
        <message>
            <source>Code</source>
            <translation>Código</translation>
        </message>
        <message>
            <source>Tools</source>
            <translation>Herramientas</translation>
        </message>
        <message>
            <source>Pictures</source>
            <translation>Imágenes</translation>
        </message>
        <message>
            <source>Embeddings</source>
            <translation>Embeddings</translation>
        </message>
        <message>
            <source>Long documents</source>
            <translation>Documentos largos</translation>
        </message>
        <message>
            <source>Many languages</source>
            <translation>Muchos idiomas</translation>
        </message>
        <message>
            <source>{0} B parameters, {1} B for each token</source>
            <translation>{0} mil M de parámetros, {1} mil M por token</translation>
        </message>
        <message>
            <source>{0} B</source>
            <translation>{0} mil M</translation>
        </message>
        <message>
            <source>gated</source>
            <translation>acceso restringido</translation>
        </message>
        <message>
            <source>{0} downloads</source>
            <translation>{0} descargas</translation>
        </message>
        <message>
            <source>{0} M</source>
            <translation>{0} M</translation>
        </message>
        <message>
            <source>{0} k</source>
            <translation>{0} k</translation>
        </message>
    </context>
    <context>
        <name>ModelsPage</name>
        <message>
            <source>Models</source>
            <translation>Modelos</translation>
        </message>
        <message>
            <source>Folders…</source>
            <translation>Carpetas…</translation>
        </message>
        <message>
            <source>Import…</source>
            <translation>Importar…</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>It frees {0} once the trash is emptied. Its converted weights are deleted.</source>
            <translation>Se liberan {0} al vaciar la papelera. Se eliminan sus pesos convertidos.</translation>
        </message>
        <message>
            <source>This is the copy in {0}. The one in {1} stays, and is listed instead.</source>
            <translation>Esta es la copia de {0}. La de {1} permanece y se mostrará en su lugar.</translation>
        </message>
        <message>
            <source>Move {0} to the trash?</source>
            <translation>¿Mover {0} a la papelera?</translation>
        </message>
        <message>
            <source>Move to the trash</source>
            <translation>Mover a la papelera</translation>
        </message>
        <message>
            <source>Load {0} anyway?</source>
            <translation>¿Cargar {0} de todos modos?</translation>
        </message>
        <message>
            <source>Download {0} and load it</source>
            <translation>Descargar {0} y cargarlo</translation>
        </message>
        <message>
            <source>{0} is being downloaded; it goes on when you leave this page.</source>
            <translation>Se está descargando {0}; continúa aunque salga de esta página.</translation>
        </message>
        <message>
            <source>{0} is on this PC now.</source>
            <translation>{0} ya está en este PC.</translation>
        </message>
        <message>
            <source>Load it</source>
            <translation>Cargarlo</translation>
        </message>
        <message>
            <source>Folder to move it to</source>
            <translation>Carpeta de destino</translation>
        </message>
        <message>
            <source>Folder for the copy</source>
            <translation>Carpeta para la copia</translation>
        </message>
        <message>
            <source>Search the hub</source>
            <translation>Buscar en el hub</translation>
        </message>
        <message>
            <source>Import a model</source>
            <translation>Importar un modelo</translation>
        </message>
    </context>
    <context>
        <name>MonitorPage</name>
        <message>
            <source>Monitor</source>
            <translation>Monitor</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>Back to live</source>
            <translation>Volver al directo</translation>
        </message>
        <message>
            <source>Hide lanes and figures</source>
            <translation>Ocultar líneas y cifras</translation>
        </message>
        <message>
            <source>Show lanes, caches and memory in detail</source>
            <translation>Mostrar líneas, cachés y memoria en detalle</translation>
        </message>
        <message>
            <source>A recorded session: {0}.</source>
            <translation>Una sesión grabada: {0}.</translation>
        </message>
        <message>
            <source>It ends early; everything intact is shown.</source>
            <translation>Termina antes de tiempo; se muestra todo lo que está intacto.</translation>
        </message>
        <message>
            <source>Compared with</source>
            <translation>Comparado con</translation>
        </message>
    </context>
    <context>
        <name>NewJob</name>
        <message>
            <source>No model is loaded.</source>
            <translation>No hay ningún modelo cargado.</translation>
        </message>
        <message>
            <source>The job starts when a model is loaded.</source>
            <translation>La tarea empieza cuando haya un modelo cargado.</translation>
        </message>
        <message>
            <source>A trial of the first rows says how long a row takes there, and what it costs.</source>
            <translation>Una prueba de las primeras filas indica cuánto tarda allí una fila y cuánto cuesta.</translation>
        </message>
        <message>
            <source>Each node plans for itself; how fast it is shows when rows are answered.</source>
            <translation>Cada nodo planifica por sí mismo; su velocidad se ve cuando se responden filas.</translation>
        </message>
    </context>
    <context>
        <name>NumbersCard</name>
        <message>
            <source>Measurements</source>
            <translation>Mediciones</translation>
        </message>
        <message>
            <source>Not measured yet. Numbers with “about” are assumed, from data sheets of similar hardware; measuring takes ten seconds.</source>
            <translation>Aún sin medir. Las cifras con «unos» son supuestas, de fichas técnicas de hardware similar; medir tarda diez segundos.</translation>
        </message>
        <message>
            <source>quick</source>
            <translation>rápida</translation>
        </message>
        <message>
            <source>thorough</source>
            <translation>exhaustiva</translation>
        </message>
        <message>
            <source>Measured on {0}, {1}. The best of each kind:</source>
            <translation>Medido el {0}, {1}. Lo mejor de cada tipo:</translation>
        </message>
        <message>
            <source>Skipped: {0} ({1}).</source>
            <translation>Omitido: {0} ({1}).</translation>
        </message>
        <message>
            <source>{0} varied by {1}% in every repeat.</source>
            <translation>{0} varió un {1} % en cada repetición.</translation>
        </message>
        <message>
            <source>Each is measured several times; the best of each kind so far:</source>
            <translation>Cada uno se mide varias veces; lo mejor de cada tipo hasta ahora:</translation>
        </message>
        <message>
            <source>Numbers appear here as they are measured.</source>
            <translation>Las cifras aparecen aquí a medida que se miden.</translation>
        </message>
    </context>
    <context>
        <name>OfferView</name>
        <message>
            <source>≈ Size from the catalogue, not checked with the hub.</source>
            <translation>≈ Tamaño según el catálogo, sin comprobar en el hub.</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Descargar</translation>
        </message>
        <message>
            <source>All files…</source>
            <translation>Todos los archivos…</translation>
        </message>
        <message>
            <source>All files of {0}</source>
            <translation>Todos los archivos de {0}</translation>
        </message>
    </context>
    <context>
        <name>OnThisPcCard</name>
        <message>
            <source>On this PC</source>
            <translation>En este PC</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modelo</translation>
        </message>
        <message>
            <source>From</source>
            <translation>De</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>Tamaño</translation>
        </message>
        <message>
            <source>Precision</source>
            <translation>Precisión</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>Tokens/s</translation>
        </message>
        <message>
            <source>Used</source>
            <translation>Usado</translation>
        </message>
        <message>
            <source>What a model can do</source>
            <translation>Lo que sabe hacer un modelo</translation>
        </message>
        <message>
            <source>Any ability</source>
            <translation>Cualquier capacidad</translation>
        </message>
        <message>
            <source>Models on this PC</source>
            <translation>Modelos en este PC</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>Cargar</translation>
        </message>
        <message>
            <source>Unload</source>
            <translation>Descargar de memoria</translation>
        </message>
        <message>
            <source>Set as default</source>
            <translation>Establecer como predeterminado</translation>
        </message>
        <message>
            <source>More</source>
            <translation>Más</translation>
        </message>
        <message>
            <source>Verify files</source>
            <translation>Verificar archivos</translation>
        </message>
        <message>
            <source>Show in folder</source>
            <translation>Mostrar en la carpeta</translation>
        </message>
        <message>
            <source>Move to another folder…</source>
            <translation>Mover a otra carpeta…</translation>
        </message>
        <message>
            <source>Export a copy…</source>
            <translation>Exportar una copia…</translation>
        </message>
        <message>
            <source>Remove…</source>
            <translation>Quitar…</translation>
        </message>
        <message>
            <source>No model is here yet: take one that suits this PC.</source>
            <translation>Aún no hay ningún modelo aquí: elija uno adecuado para este PC.</translation>
        </message>
        <message>
            <source>No model here can do that.</source>
            <translation>Ningún modelo de aquí tiene esta marca.</translation>
        </message>
        <message>
            <source>1 model</source>
            <translation>1 modelo</translation>
        </message>
        <message numerus="yes">
            <source>{0} models</source>
            <translation>
                <numerusform>{0} modelo</numerusform>
                <numerusform>{0} modelos</numerusform>
            </translation>
        </message>
        <message>
            <source>Default</source>
            <translation>Predeterminado</translation>
        </message>
        <message>
            <source>Delete converted weights ({0})</source>
            <translation>Eliminar pesos convertidos ({0})</translation>
        </message>
        <message>
            <source>Unload it first.</source>
            <translation>Descárguelo primero de la memoria.</translation>
        </message>
        <message>
            <source>It is used where it lies: remove it there.</source>
            <translation>Se usa donde está: quítelo allí.</translation>
        </message>
    </context>
    <context>
        <name>OtherProgramsCard</name>
        <message>
            <source>How programs reach it</source>
            <translation>Cómo lo alcanzan los programas</translation>
        </message>
        <message>
            <source>Copy address</source>
            <translation>Copiar dirección</translation>
        </message>
        <message>
            <source>Address</source>
            <translation>Dirección</translation>
        </message>
        <message>
            <source>Show</source>
            <translation>Mostrar</translation>
        </message>
        <message>
            <source>Show the key</source>
            <translation>Mostrar la clave</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Copiar</translation>
        </message>
        <message>
            <source>Copy the key</source>
            <translation>Copiar la clave</translation>
        </message>
        <message>
            <source>New key</source>
            <translation>Clave nueva</translation>
        </message>
        <message>
            <source>Free</source>
            <translation>Liberar</translation>
        </message>
        <message>
            <source>Models asked for by name</source>
            <translation>Modelos pedidos por su nombre</translation>
        </message>
        <message>
            <source>Copy example</source>
            <translation>Copiar ejemplo</translation>
        </message>
        <message>
            <source>OpenAI's interface is at /v1; programs for Anthropic or Ollama take the address alone.</source>
            <translation>La interfaz de OpenAI está en /v1; los programas para Anthropic u Ollama usan solo la dirección.</translation>
        </message>
        <message>
            <source>Example</source>
            <translation>Ejemplo</translation>
        </message>
        <message>
            <source>Requests</source>
            <translation>Peticiones</translation>
        </message>
        <message>
            <source>Key</source>
            <translation>Clave</translation>
        </message>
        <message>
            <source>Off. Nothing listens, and no editor, agent or other app can ask.</source>
            <translation>Desactivado. Nada escucha, y ningún editor, agente u otra app puede preguntar.</translation>
        </message>
        <message>
            <source>Starting…</source>
            <translation>Iniciando…</translation>
        </message>
        <message>
            <source>On, for all models on this PC. Chats in this window come first.</source>
            <translation>Activado, para todos los modelos de este PC. Los chats de esta ventana tienen prioridad.</translation>
        </message>
        <message>
            <source>Off, because of a problem.</source>
            <translation>Desactivado por un problema.</translation>
        </message>
        <message>
            <source>No other PC can reach it. Any program here can.</source>
            <translation>Ningún otro PC puede alcanzarlo. Cualquier programa de aquí puede.</translation>
        </message>
        <message>
            <source>No other PC can reach it. Programs here need the key.</source>
            <translation>Ningún otro PC puede alcanzarlo. Los programas de aquí necesitan la clave.</translation>
        </message>
        <message>
            <source>What is asked and answered crosses your network unencrypted: use it only at home.</source>
            <translation>Lo que se pregunta y responde cruza su red sin cifrar: úselo solo en casa.</translation>
        </message>
        <message>
            <source>{0} is being loaded.</source>
            <translation>Se está cargando {0}.</translation>
        </message>
        <message>
            <source>{0} is loaded.</source>
            <translation>{0} está cargado.</translation>
        </message>
        <message>
            <source>Any model on this PC: it is loaded beside yours, one at a time.</source>
            <translation>Cualquier modelo de este PC: se carga junto al suyo, uno cada vez.</translation>
        </message>
        <message>
            <source>In the system's keyring.</source>
            <translation>En el llavero del sistema.</translation>
        </message>
        <message>
            <source>For this run only: this system has no keyring.</source>
            <translation>Solo durante esta ejecución: este sistema no tiene llavero.</translation>
        </message>
        <message>
            <source>Since the window opened; what was asked and answered is not kept.</source>
            <translation>Desde que se abrió la ventana; lo preguntado y respondido no se guarda.</translation>
        </message>
        <message>
            <source>None yet.</source>
            <translation>Ninguna todavía.</translation>
        </message>
    </context>
    <context>
        <name>OutputCard</name>
        <message>
            <source>Result file</source>
            <translation>Archivo de resultado</translation>
        </message>
        <message>
            <source>Name of the result file</source>
            <translation>Nombre del archivo de resultado</translation>
        </message>
        <message>
            <source>File type</source>
            <translation>Tipo de archivo</translation>
        </message>
        <message>
            <source>Another folder…</source>
            <translation>Otra carpeta…</translation>
        </message>
        <message>
            <source>In</source>
            <translation>En</translation>
        </message>
        <message>
            <source>In OpenAI's output format; rows that fail go into an error file beside it.</source>
            <translation>En el formato de salida de OpenAI; las filas con error van a un archivo de errores al lado.</translation>
        </message>
        <message>
            <source>Keeps the input's columns; adds the answer, how it ended, token counts and, for failed rows, why.</source>
            <translation>Conserva las columnas de la entrada; añade la respuesta, cómo terminó, el número de tokens y, en las filas con error, el motivo.</translation>
        </message>
        <message>
            <source>Name the result file.</source>
            <translation>Dé un nombre al archivo de resultado.</translation>
        </message>
        <message>
            <source>The result file's name contains a slash: choose the folder beside it instead.</source>
            <translation>El nombre del archivo de resultado contiene una barra: elija en su lugar la carpeta, al lado.</translation>
        </message>
        <message>
            <source>Folder of the result file</source>
            <translation>Carpeta del archivo de resultado</translation>
        </message>
    </context>
    <context>
        <name>Pages</name>
        <message>
            <source>Chat</source>
            <translation>Chat</translation>
        </message>
        <message>
            <source>Batch</source>
            <translation>Lotes</translation>
        </message>
        <message>
            <source>Monitor</source>
            <translation>Monitor</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>Optimizar</translation>
        </message>
        <message>
            <source>Models</source>
            <translation>Modelos</translation>
        </message>
        <message>
            <source>Settings</source>
            <translation>Configuración</translation>
        </message>
        <message>
            <source>Choose a first model</source>
            <translation>Elegir un primer modelo</translation>
        </message>
    </context>
    <context>
        <name>PassageDialog</name>
        <message>
            <source>Source {0}</source>
            <translation>Fuente {0}</translation>
        </message>
        <message>
            <source>Document</source>
            <translation>Documento</translation>
        </message>
        <message>
            <source>The passage and what stands around it</source>
            <translation>El pasaje y lo que lo rodea</translation>
        </message>
        <message>
            <source>Looking for the passage…</source>
            <translation>Buscando el pasaje…</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>This passage is no longer there: the document has changed or was removed since.</source>
            <translation>Este pasaje ya no existe: el documento se modificó o se quitó después.</translation>
        </message>
    </context>
    <context>
        <name>PictureRow</name>
        <message>
            <source>Remove picture {0}</source>
            <translation>Quitar la imagen {0}</translation>
        </message>
        <message>
            <source>damaged picture</source>
            <translation>imagen dañada</translation>
        </message>
        <message>
            <source>Picture {0} of {1}</source>
            <translation>Imagen {0} de {1}</translation>
        </message>
        <message>
            <source>{0}, {1} by {2} pixels</source>
            <translation>{0}, {1} por {2} píxeles</translation>
        </message>
    </context>
    <context>
        <name>Pictures</name>
        <message>
            <source>A message takes up to {0} pictures.</source>
            <translation>Un mensaje admite hasta {0} imágenes.</translation>
        </message>
        <message>
            <source>A chat takes {0} of pictures: start a new chat for more.</source>
            <translation>Un chat admite {0} de imágenes: empiece un chat nuevo para más.</translation>
        </message>
        <message>
            <source>{0} is not a file.</source>
            <translation>{0} no es un archivo.</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}).</source>
            <translation>No se puede leer {0} ({1}).</translation>
        </message>
        <message>
            <source>{0} is larger than {1}: make it smaller first.</source>
            <translation>{0} supera {1}: reduzca antes su tamaño.</translation>
        </message>
        <message>
            <source>{0} is damaged and cannot be shown.</source>
            <translation>{0} está dañado y no se puede mostrar.</translation>
        </message>
        <message>
            <source>{0} is in the {1} format, which is not read here: save it as PNG or JPEG.</source>
            <translation>{0} está en el formato {1}, que aquí no se lee: guárdela como PNG o JPEG.</translation>
        </message>
        <message>
            <source>{0} is not a PNG, JPEG, WebP or GIF picture.</source>
            <translation>{0} no es una imagen PNG, JPEG, WebP o GIF.</translation>
        </message>
        <message>
            <source>{0} has too many pixels: make it smaller first.</source>
            <translation>{0} tiene demasiados píxeles: reduzca antes su tamaño.</translation>
        </message>
    </context>
    <context>
        <name>PlaceRows</name>
        <message>
            <source>Who answers the rows</source>
            <translation>Quién responde las filas</translation>
        </message>
        <message>
            <source>1 row</source>
            <translation>1 fila</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows</source>
            <translation>
                <numerusform>{0} fila</numerusform>
                <numerusform>{0} filas</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>PlacesCard</name>
        <message>
            <source>Answered by</source>
            <translation>Responde</translation>
        </message>
        <message>
            <source>Ask two for slow last rows</source>
            <translation>Preguntar a dos en las últimas filas lentas</translation>
        </message>
        <message>
            <source>Near the end, a row that one server is slow with is asked of another as well, which costs tokens.</source>
            <translation>Cerca del final, una fila con la que un servidor tarda se pregunta también a otro, lo que cuesta tokens.</translation>
        </message>
        <message>
            <source>Add a column that says who answered</source>
            <translation>Añadir una columna que diga quién respondió</translation>
        </message>
        <message>
            <source>A Ray cluster at</source>
            <translation>Un clúster de Ray en</translation>
        </message>
        <message>
            <source>Each of its nodes answers rows with the model that is loaded here.</source>
            <translation>Cada uno de sus nodos responde filas con el modelo cargado aquí.</translation>
        </message>
        <message>
            <source>Address of the Ray cluster</source>
            <translation>Dirección del clúster de Ray</translation>
        </message>
        <message>
            <source>auto, or 10.0.0.5:6379</source>
            <translation>auto, o 10.0.0.5:6379</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>Este PC</translation>
        </message>
        <message>
            <source>Give the address of the Ray cluster, or auto for the one of this PC.</source>
            <translation>Indique la dirección del clúster de Ray, o auto para el de este PC.</translation>
        </message>
        <message>
            <source>Choose who answers the rows.</source>
            <translation>Elija quién responde las filas.</translation>
        </message>
    </context>
    <context>
        <name>PlanBars</name>
        <message>
            <source>experts, {0} slots</source>
            <translation>expertos, {0} huecos</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>expertos</translation>
        </message>
        <message>
            <source>model</source>
            <translation>modelo</translation>
        </message>
        <message>
            <source>loading buffers</source>
            <translation>búferes de carga</translation>
        </message>
        <message>
            <source>chat memory</source>
            <translation>memoria del chat</translation>
        </message>
        <message>
            <source>working memory</source>
            <translation>memoria de trabajo</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>lectura de imágenes</translation>
        </message>
        <message>
            <source>safety margin</source>
            <translation>margen de seguridad</translation>
        </message>
        <message>
            <source>other programs</source>
            <translation>otros programas</translation>
        </message>
        <message>
            <source>Memory by tier</source>
            <translation>Memoria por nivel</translation>
        </message>
        <message>
            <source>under {0}</source>
            <translation>menos de {0}</translation>
        </message>
        <message>
            <source>free</source>
            <translation>libre</translation>
        </message>
        <message>
            <source>{0} GB</source>
            <translation>{0} GB</translation>
        </message>
        <message>
            <source>{0} of {1} GB</source>
            <translation>{0} de {1} GB</translation>
        </message>
    </context>
    <context>
        <name>PlanCard</name>
        <message>
            <source>Plan</source>
            <translation>Plan</translation>
        </message>
        <message>
            <source>Planning…</source>
            <translation>Planificando…</translation>
        </message>
        <message>
            <source>{0} {1}: {2}</source>
            <translation>{0} {1}: {2}</translation>
        </message>
        <message>
            <source>Alternatives, in tokens/s: {0}.</source>
            <translation>Alternativas, en tokens/s: {0}.</translation>
        </message>
        <message>
            <source>Plan for {0}</source>
            <translation>Plan para {0}</translation>
        </message>
    </context>
    <context>
        <name>PlanTable</name>
        <message>
            <source>Plan</source>
            <translation>Plan</translation>
        </message>
        <message>
            <source>Predicted</source>
            <translation>Previsto</translation>
        </message>
        <message>
            <source>Timed</source>
            <translation>Medido</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>Tokens/s</translation>
        </message>
        <message>
            <source>predicted {0} tokens/s ({1} to {2})</source>
            <translation>previsto {0} tokens/s ({1} a {2})</translation>
        </message>
        <message>
            <source>timed {0} tokens/s</source>
            <translation>medido {0} tokens/s</translation>
        </message>
        <message>
            <source>{2} runs from {0} to {1}</source>
            <translation>{2} pasadas de {0} a {1}</translation>
        </message>
        <message>
            <source>first token after {0} s</source>
            <translation>primer token a los {0} s</translation>
        </message>
        <message>
            <source>winner</source>
            <translation>ganador</translation>
        </message>
        <message>
            <source>the plan</source>
            <translation>el plan</translation>
        </message>
        <message>
            <source>as it ran before</source>
            <translation>como antes</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>error</translation>
        </message>
    </context>
    <context>
        <name>PoliciesCard</name>
        <message>
            <source>Policies</source>
            <translation>Políticas</translation>
        </message>
        <message>
            <source>Cache policies</source>
            <translation>Políticas de caché</translation>
        </message>
        <message>
            <source>When the cache is full, a policy decides which expert to evict for the next one. Each is tested on the model's actual requests; its share of hits (experts found in the cache) shows how well it would do.</source>
            <translation>Cuando la caché está llena, una política decide qué experto expulsar para el siguiente. Cada una se prueba con las peticiones reales del modelo; su porcentaje de aciertos (expertos hallados en la caché) muestra qué tal lo haría.</translation>
        </message>
        <message>
            <source>recent hit rate, each on its own</source>
            <translation>tasa de aciertos reciente, cada una por separado</translation>
        </message>
        <message>
            <source>All are simulated on the live routing; the one with the most hits is adopted.</source>
            <translation>Todas se simulan con el enrutamiento en vivo; se adopta la que tiene más aciertos.</translation>
        </message>
        <message>
            <source>The policy is set in the settings; the others are simulated.</source>
            <translation>La política está fijada en la configuración; las demás se simulan.</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>{0} in use</source>
            <translation>{0} en uso</translation>
        </message>
    </context>
    <context>
        <name>PredictButton</name>
        <message>
            <source>Predicted</source>
            <translation>Previsto</translation>
        </message>
        <message>
            <source>The simulator's prediction for this request, below the recording</source>
            <translation>La previsión del simulador para esta petición, bajo la grabación</translation>
        </message>
        <message>
            <source>Show the predicted timeline</source>
            <translation>Mostrar la cronología prevista</translation>
        </message>
        <message>
            <source>Nothing to predict yet: ask something in Chat first.</source>
            <translation>Aún no hay nada que prever: pregunte primero algo en Chat.</translation>
        </message>
        <message>
            <source>the model's files could not be read</source>
            <translation>no se pudieron leer los archivos del modelo</translation>
        </message>
        <message>
            <source>No prediction: {0}</source>
            <translation>Sin previsión: {0}</translation>
        </message>
    </context>
    <context>
        <name>Predicted</name>
        <message>
            <source>{0} tokens/s predicted</source>
            <translation>{0} tokens/s previstos</translation>
        </message>
        <message>
            <source>{0} measured</source>
            <translation>{0} medidos</translation>
        </message>
        <message>
            <source>first token after {0}</source>
            <translation>primer token a los {0}</translation>
        </message>
        <message>
            <source>Simulated for {0} tokens read and {1} written, aligned at the same step.</source>
            <translation>Simulado para {0} tokens leídos y {1} escritos, alineado en el mismo paso.</translation>
        </message>
        <message>
            <source>Measured here: {0}.</source>
            <translation>Medido aquí: {0}.</translation>
        </message>
        <message>
            <source>From data sheets, not measured by Tune: {0}.</source>
            <translation>De fichas técnicas, no medido por Optimizar: {0}.</translation>
        </message>
        <message>
            <source>Assumed: typical expert popularity, so that {0} slots hit {1}%;</source>
            <translation>Se supone: popularidad típica de los expertos, de modo que {0} huecos aciertan un {1} %;</translation>
        </message>
        <message>
            <source>Assumed: typical expert popularity;</source>
            <translation>Se supone: popularidad típica de los expertos;</translation>
        </message>
        <message>
            <source>no other program is running.</source>
            <translation>no hay otros programas en marcha.</translation>
        </message>
        <message>
            <source>processor and RAM</source>
            <translation>procesador y RAM</translation>
        </message>
        <message>
            <source>graphics card</source>
            <translation>tarjeta gráfica</translation>
        </message>
        <message>
            <source>PCIe</source>
            <translation>PCIe</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>disco</translation>
        </message>
    </context>
    <context>
        <name>PredictionCard</name>
        <message>
            <source>Prefetching</source>
            <translation>Precarga</translation>
        </message>
        <message>
            <source>Prefetching copies experts before they are needed, guessing which will be. A right guess saves a miss, a wait for memory; a wrong one costs a useless copy.</source>
            <translation>La precarga copia expertos antes de que se necesiten, adivinando cuáles serán. Si acierta, evita un fallo, una espera de memoria; si no, cuesta una copia inútil.</translation>
        </message>
        <message>
            <source>In use: {0}, one layer ahead.</source>
            <translation>En uso: {0}, una capa por delante.</translation>
        </message>
        <message numerus="yes">
            <source>In use: {0}, {1} layers ahead.</source>
            <translation>
                <numerusform>En uso: {0}, {1} capa por delante.</numerusform>
                <numerusform>En uso: {0}, {1} capas por delante.</numerusform>
            </translation>
        </message>
        <message>
            <source>None is in use: no predictor would save more than it costs.</source>
            <translation>Ninguno en uso: ningún predictor ahorraría más de lo que cuesta.</translation>
        </message>
        <message>
            <source>Nothing is predicted on this model and machine: experts are fetched on a miss.</source>
            <translation>Con este modelo y esta máquina no se predice nada: los expertos se traen en caso de fallo.</translation>
        </message>
        <message>
            <source>Predictor</source>
            <translation>Predictor</translation>
        </message>
        <message>
            <source>predicted</source>
            <translation>previsto</translation>
        </message>
        <message>
            <source>right</source>
            <translation>acertados</translation>
        </message>
        <message>
            <source>gain</source>
            <translation>ganancia</translation>
        </message>
        <message>
            <source>{0} ms</source>
            <translation>{0} ms</translation>
        </message>
        <message>
            <source>Share of the missing experts that was predicted</source>
            <translation>Parte de los expertos que faltaban que se predijo</translation>
        </message>
        <message>
            <source>Share of the predicted, missing experts that was needed</source>
            <translation>Parte de los expertos predichos que faltaban que se necesitó</translation>
        </message>
        <message>
            <source>Milliseconds its use would save per step, net of its cost</source>
            <translation>Milisegundos que ahorraría por paso, descontado su coste</translation>
        </message>
        <message>
            <source>used</source>
            <translation>usados</translation>
        </message>
        <message>
            <source>wasted</source>
            <translation>inútiles</translation>
        </message>
        <message>
            <source>{0}: of {1} prefetched, {2} used, {3} wasted (hatched), the rest waits.</source>
            <translation>{0}: de {1} precargados, {2} usados, {3} inútiles (rayado), el resto espera.</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
    </context>
    <context>
        <name>ProgressCard</name>
        <message>
            <source>Job progress</source>
            <translation>Progreso de la tarea</translation>
        </message>
    </context>
    <context>
        <name>PromptPopover</name>
        <message>
            <source>Saved prompts</source>
            <translation>Prompts guardados</translation>
        </message>
        <message>
            <source>Find a prompt</source>
            <translation>Buscar un prompt</translation>
        </message>
        <message>
            <source>/</source>
            <translation>/</translation>
        </message>
        <message>
            <source>Saved prompts, in an empty message</source>
            <translation>Prompts guardados, en un mensaje vacío</translation>
        </message>
        <message>
            <source>Save this message…</source>
            <translation>Guardar este mensaje…</translation>
        </message>
        <message>
            <source>New…</source>
            <translation>Nuevo…</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>Editar…</translation>
        </message>
        <message>
            <source>Delete</source>
            <translation>Eliminar</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Deshacer</translation>
        </message>
        <message>
            <source>No saved prompt has these words.</source>
            <translation>Ningún prompt guardado contiene estas palabras.</translation>
        </message>
        <message>
            <source>Nothing is saved yet. A saved prompt is a message to use again; where it says {{topic}}, you are asked for the topic each time.</source>
            <translation>Aún no hay nada guardado. Un prompt guardado es un mensaje para reutilizar; donde diga {{topic}}, se le preguntará cada vez por «topic».</translation>
        </message>
        <message>
            <source>Insert</source>
            <translation>Insertar</translation>
        </message>
        <message>
            <source>Back</source>
            <translation>Atrás</translation>
        </message>
        <message>
            <source>Name of the prompt</source>
            <translation>Nombre del prompt</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>Nombre</translation>
        </message>
        <message>
            <source>Prompt</source>
            <translation>Prompt</translation>
        </message>
        <message>
            <source>Summarise {{text}} in {{number}} sentences.</source>
            <translation>Resume {{text}} en {{number}} frases.</translation>
        </message>
        <message>
            <source>A name between double braces, such as {{topic}}, is asked for each time.</source>
            <translation>Un nombre entre llaves dobles, como {{topic}}, se pregunta cada vez.</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Guardar</translation>
        </message>
        <message>
            <source>Another prompt has this name: saving replaces it.</source>
            <translation>Otro prompt tiene este nombre: al guardar se reemplaza.</translation>
        </message>
    </context>
    <context>
        <name>QuickPrompt</name>
        <message>
            <source>Quick question</source>
            <translation>Pregunta rápida</translation>
        </message>
        <message>
            <source>Ask something</source>
            <translation>Pregunte algo</translation>
        </message>
        <message>
            <source>Question</source>
            <translation>Pregunta</translation>
        </message>
        <message>
            <source>Enter asks, Shift+Enter starts a new line, Esc closes</source>
            <translation>Intro pregunta, Mayús+Intro empieza una línea nueva, Esc cierra</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>Respuesta</translation>
        </message>
        <message>
            <source>Open in Switchyard</source>
            <translation>Abrir en Switchyard</translation>
        </message>
        <message>
            <source>The server that answers new chats is not in the list: choose another model.</source>
            <translation>El servidor que responde los chats nuevos no está en la lista: elija otro modelo.</translation>
        </message>
        <message>
            <source>This would go to {0}: send a chat there from Switchyard first.</source>
            <translation>Esto iría a {0}: envíe antes allí un chat desde Switchyard.</translation>
        </message>
        <message>
            <source>Waiting for the answer…</source>
            <translation>Esperando la respuesta…</translation>
        </message>
        <message>
            <source>Thinking…</source>
            <translation>Pensando…</translation>
        </message>
        <message>
            <source>The engine is not running: open Switchyard to restart it.</source>
            <translation>El motor no está en marcha: abra Switchyard para reiniciarlo.</translation>
        </message>
        <message>
            <source>No model is loaded: open Switchyard to choose one.</source>
            <translation>No hay ningún modelo cargado: abra Switchyard para elegir uno.</translation>
        </message>
        <message>
            <source>The model is loading; the answer follows.</source>
            <translation>El modelo se está cargando; la respuesta llegará después.</translation>
        </message>
        <message>
            <source>Waiting for another answer…</source>
            <translation>Esperando otra respuesta…</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>Detener</translation>
        </message>
        <message>
            <source>Ask</source>
            <translation>Preguntar</translation>
        </message>
    </context>
    <context>
        <name>RaceCard</name>
        <message>
            <source>Timed on the real engine</source>
            <translation>Cronometrado en el motor real</translation>
        </message>
        <message>
            <source>Nothing timed yet: “Tune” times the best plans and the current settings with real tokens.</source>
            <translation>Aún no hay nada cronometrado: «Optimizar» mide los mejores planes y los ajustes actuales con tokens reales.</translation>
        </message>
        <message>
            <source>Use winner now</source>
            <translation>Usar el ganador</translation>
        </message>
        <message>
            <source>Keep as before</source>
            <translation>Dejar como antes</translation>
        </message>
        <message>
            <source>Bars: measured, which is what counts. Brackets: the predicted range.</source>
            <translation>Barras: lo medido, que es lo que cuenta. Corchetes: el intervalo previsto.</translation>
        </message>
        <message>
            <source>{0}, {1}</source>
            <translation>{0}, {1}</translation>
        </message>
        <message>
            <source>Before {0} → after {1} tokens/s</source>
            <translation>Antes {0} → después {1} tokens/s</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>This model now runs with it: {0}, {1} tokens/s.</source>
            <translation>Este modelo funciona ahora con él: {0}, {1} tokens/s.</translation>
        </message>
        <message>
            <source>This model has since run at {0} tokens/s, much faster than the {1} timed here: the machine was busy then. Plans no longer use these figures. Tune again.</source>
            <translation>Este modelo ha funcionado desde entonces a {0} tokens/s, mucho más rápido que los {1} medidos aquí: la máquina estaba ocupada. Los planes ya no usan estas cifras. Optimice de nuevo.</translation>
        </message>
        <message>
            <source>Other programs used {0}% of the CPU while this was timed: every figure is too low, and the wrong plan may have won. Plans do not use these figures. Tune again when those programs have finished.</source>
            <translation>Otros programas usaron el {0} % de la CPU durante la medición: todas las cifras son demasiado bajas y quizá ganó el plan equivocado. Los planes no usan estas cifras. Optimice de nuevo cuando esos programas hayan terminado.</translation>
        </message>
    </context>
    <context>
        <name>RaceDelegate</name>
        <message>
            <source>waits</source>
            <translation>espera</translation>
        </message>
    </context>
    <context>
        <name>RaceView</name>
        <message>
            <source>Plans, predicted and measured</source>
            <translation>Planes, previstos y medidos</translation>
        </message>
    </context>
    <context>
        <name>RangeBar</name>
        <message>
            <source>10 s</source>
            <translation>10 s</translation>
        </message>
        <message>
            <source>Show 10 seconds</source>
            <translation>Mostrar 10 segundos</translation>
        </message>
        <message>
            <source>60 s</source>
            <translation>60 s</translation>
        </message>
        <message>
            <source>Show 60 seconds</source>
            <translation>Mostrar 60 segundos</translation>
        </message>
        <message>
            <source>5 min</source>
            <translation>5 min</translation>
        </message>
        <message>
            <source>Show 5 minutes</source>
            <translation>Mostrar 5 minutos</translation>
        </message>
        <message>
            <source>Session</source>
            <translation>Sesión</translation>
        </message>
        <message>
            <source>Show the whole session</source>
            <translation>Mostrar toda la sesión</translation>
        </message>
        <message>
            <source>Freeze</source>
            <translation>Congelar</translation>
        </message>
        <message>
            <source>Frozen</source>
            <translation>Congelado</translation>
        </message>
        <message>
            <source>Space freezes</source>
            <translation>Espacio congela</translation>
        </message>
        <message>
            <source>Frozen: Home follows</source>
            <translation>Congelado: Inicio sigue</translation>
        </message>
        <message>
            <source>Space freezes the view; recording continues</source>
            <translation>Espacio congela la vista; la grabación continúa</translation>
        </message>
        <message>
            <source>Home follows live data</source>
            <translation>Inicio sigue los datos en directo</translation>
        </message>
        <message>
            <source>Freeze the view; recording continues</source>
            <translation>Congelar la vista; la grabación continúa</translation>
        </message>
        <message>
            <source>Follow live data</source>
            <translation>Seguir los datos en directo</translation>
        </message>
    </context>
    <context>
        <name>RecommendationList</name>
        <message>
            <source>≈ Size from the catalogue, not checked with the hub.</source>
            <translation>≈ Tamaño según el catálogo, sin comprobar en el hub.</translation>
        </message>
    </context>
    <context>
        <name>RecommendationRow</name>
        <message>
            <source>Download</source>
            <translation>Descargar</translation>
        </message>
    </context>
    <context>
        <name>Recommendations</name>
        <message>
            <source>Fast</source>
            <translation>Rápido</translation>
        </message>
        <message>
            <source>Balanced</source>
            <translation>Equilibrado</translation>
        </message>
        <message>
            <source>Best that fits</source>
            <translation>El mejor que cabe</translation>
        </message>
        <message>
            <source>on this PC</source>
            <translation>en este PC</translation>
        </message>
        <message>
            <source>first answer in about {0}</source>
            <translation>primera respuesta en unos {0}</translation>
        </message>
        <message>
            <source>first answer in about {0} at 100 Mbit/s</source>
            <translation>primera respuesta en unos {0} a 100 Mbit/s</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Descargar</translation>
        </message>
        <message>
            <source>Downloading</source>
            <translation>Descargando</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>Cargar</translation>
        </message>
    </context>
    <context>
        <name>Report</name>
        <message>
            <source>Save a report</source>
            <translation>Guardar un informe</translation>
        </message>
        <message>
            <source>Text (*.txt)</source>
            <translation>Texto (*.txt)</translation>
        </message>
    </context>
    <context>
        <name>Resizing</name>
        <message>
            <source>Requested {0} experts…</source>
            <translation>{0} expertos solicitados…</translation>
        </message>
        <message>
            <source>Stays at {0} experts: no room for {1}.</source>
            <translation>Se queda en {0} expertos: no hay sitio para {1}.</translation>
        </message>
        <message>
            <source>Stays at {0} experts: {1} is not a valid size, or too few for a step.</source>
            <translation>Se queda en {0} expertos: {1} no es un tamaño válido, o es poco para un paso.</translation>
        </message>
        <message>
            <source>Now {0} experts, was {1}; no room for {2}.</source>
            <translation>Ahora {0} expertos, antes {1}; no hay sitio para {2}.</translation>
        </message>
        <message>
            <source>Now {0} experts, was {1}.</source>
            <translation>Ahora {0} expertos, antes {1}.</translation>
        </message>
        <message>
            <source>hits {0}%, was {1}%</source>
            <translation>aciertos {0} %, antes {1} %</translation>
        </message>
        <message>
            <source>{0} tokens/s, was {1}</source>
            <translation>{0} tokens/s, antes {1}</translation>
        </message>
        <message>
            <source>(predicted: {0})</source>
            <translation>(previsto: {0})</translation>
        </message>
        <message>
            <source>Measured: {0}.</source>
            <translation>Medido: {0}.</translation>
        </message>
    </context>
    <context>
        <name>RooflinePlot</name>
        <message>
            <source>operations per byte →</source>
            <translation>operaciones por byte →</translation>
        </message>
        <message>
            <source>Roofline</source>
            <translation>Roofline</translation>
        </message>
        <message>
            <source>{0}: {1}, up to {2}</source>
            <translation>{0}: {1}, hasta {2}</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>GPU over the link</source>
            <translation>GPU por el enlace</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>limited by the link to the card</source>
            <translation>limitado por el enlace con la tarjeta</translation>
        </message>
        <message>
            <source>limited by the card's memory</source>
            <translation>limitado por la memoria de la tarjeta</translation>
        </message>
        <message>
            <source>limited by GPU compute</source>
            <translation>limitado por el cálculo de la GPU</translation>
        </message>
        <message>
            <source>limited by RAM</source>
            <translation>limitado por la RAM</translation>
        </message>
        <message>
            <source>limited by CPU compute</source>
            <translation>limitado por el cálculo de la CPU</translation>
        </message>
        <message>
            <source>{0}: {1} operations per byte, {2}, {3}</source>
            <translation>{0}: {1} operaciones por byte, {2}, {3}</translation>
        </message>
        <message>
            <source>decode</source>
            <translation>decodificación</translation>
        </message>
        <message>
            <source>prefill</source>
            <translation>prellenado</translation>
        </message>
        <message>
            <source>batch</source>
            <translation>lotes</translation>
        </message>
    </context>
    <context>
        <name>RowDetail</name>
        <message>
            <source>Prompt</source>
            <translation>Prompt</translation>
        </message>
        <message>
            <source>Reasoning</source>
            <translation>Razonamiento</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>Respuesta</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Copiar</translation>
        </message>
        <message>
            <source>Copy the answer</source>
            <translation>Copiar la respuesta</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>Row {0}</source>
            <translation>Fila {0}</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} tokens</translation>
        </message>
        <message>
            <source>Failed: the row {0}.</source>
            <translation>Error. La fila: {0}.</translation>
        </message>
        <message>
            <source>The input can no longer be read, or the row was not sent.</source>
            <translation>La entrada ya no se puede leer, o la fila no se envió.</translation>
        </message>
    </context>
    <context>
        <name>RowsCard</name>
        <message>
            <source>Finished rows</source>
            <translation>Filas listas</translation>
        </message>
        <message>
            <source>Row</source>
            <translation>Fila</translation>
        </message>
        <message>
            <source>Prompt</source>
            <translation>Prompt</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>Respuesta</translation>
        </message>
        <message>
            <source>End</source>
            <translation>Fin</translation>
        </message>
        <message>
            <source>Tokens</source>
            <translation>Tokens</translation>
        </message>
        <message>
            <source>Answer again with more tokens</source>
            <translation>Responder con más tokens</translation>
        </message>
        <message>
            <source>Twice as many as each of them had</source>
            <translation>El doble de los que tenía cada una</translation>
        </message>
        <message>
            <source>Latest</source>
            <translation>Últimas</translation>
        </message>
        <message>
            <source>All</source>
            <translation>Todas</translation>
        </message>
        <message>
            <source>Failed</source>
            <translation>Con error</translation>
        </message>
        <message>
            <source>Cut off</source>
            <translation>Cortadas</translation>
        </message>
        <message>
            <source>No row has failed.</source>
            <translation>Ninguna fila ha fallado.</translation>
        </message>
        <message>
            <source>No row was cut off at its limit of tokens.</source>
            <translation>Ninguna fila se cortó en su límite de tokens.</translation>
        </message>
        <message>
            <source>Rows appear here as they are answered.</source>
            <translation>Las filas aparecen aquí a medida que se responden.</translation>
        </message>
        <message>
            <source>No row has been answered yet.</source>
            <translation>Aún no se ha respondido ninguna fila.</translation>
        </message>
    </context>
    <context>
        <name>RunCard</name>
        <message>
            <source>Tuning</source>
            <translation>Optimización</translation>
        </message>
        <message>
            <source>A model, by a few letters of its name</source>
            <translation>Un modelo, por unas letras de su nombre</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modelo</translation>
        </message>
        <message>
            <source>A model on this PC, one of the catalogue, or a hub id such as Qwen/Qwen3-30B-A3B</source>
            <translation>Un modelo de este PC, uno del catálogo o un identificador del hub como Qwen/Qwen3-30B-A3B</translation>
        </message>
        <message>
            <source>Quick, 10 s</source>
            <translation>Rápida, 10 s</translation>
        </message>
        <message>
            <source>Quick: measures for about ten seconds</source>
            <translation>Rápida: mide durante unos diez segundos</translation>
        </message>
        <message>
            <source>Thorough, 2 min</source>
            <translation>Exhaustiva, 2 min</translation>
        </message>
        <message>
            <source>Thorough: measures for about two minutes</source>
            <translation>Exhaustiva: mide durante unos dos minutos</translation>
        </message>
        <message>
            <source>Measure only</source>
            <translation>Solo medir</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>Optimizar</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>Progress</source>
            <translation>Progreso</translation>
        </message>
        <message>
            <source>Save anyway</source>
            <translation>Guardar de todos modos</translation>
        </message>
        <message>
            <source>Saves figures that are too low because other programs were busy</source>
            <translation>Guarda cifras demasiado bajas porque otros programas estaban ocupados</translation>
        </message>
        <message>
            <source>Cancelling</source>
            <translation>Cancelando</translation>
        </message>
        <message>
            <source>Cancelling. The previous model is loaded again.</source>
            <translation>Cancelando. Se vuelve a cargar el modelo anterior.</translation>
        </message>
        <message>
            <source>Tune again</source>
            <translation>Optimizar de nuevo</translation>
        </message>
        <message>
            <source>Only models on this PC can be timed; of this one you see a plan.</source>
            <translation>Solo se pueden cronometrar modelos de este PC; de este se muestra un plan.</translation>
        </message>
        <message>
            <source>Get it on the Models page…</source>
            <translation>Obtenerlo en la página Modelos…</translation>
        </message>
        <message>
            <source>Get another model…</source>
            <translation>Obtener otro modelo…</translation>
        </message>
    </context>
    <context>
        <name>RunFollowing</name>
        <message>
            <source>Waiting for the answer</source>
            <translation>Esperando la respuesta</translation>
        </message>
        <message>
            <source>Waiting for the engine</source>
            <translation>Esperando al motor</translation>
        </message>
        <message>
            <source>being timed</source>
            <translation>midiéndose</translation>
        </message>
        <message>
            <source>being loaded</source>
            <translation>cargándose</translation>
        </message>
        <message>
            <source>Cancelled: nothing was saved or changed.</source>
            <translation>Cancelado: no se guardó ni cambió nada.</translation>
        </message>
        <message>
            <source>Not saved: other programs used {0}% of the CPU, so these figures are too low. Close them or let them finish, then tune again.</source>
            <translation>No se guardó: otros programas usaron el {0} % de la CPU, así que estas cifras son demasiado bajas. Ciérrelos o deje que terminen y optimice de nuevo.</translation>
        </message>
        <message>
            <source>Saved. Loading the model with it.</source>
            <translation>Guardado. El modelo se carga con ello.</translation>
        </message>
    </context>
    <context>
        <name>RunningJobGuard</name>
        <message>
            <source>A batch job is running.</source>
            <translation>Hay una tarea por lotes en curso.</translation>
        </message>
        <message>
            <source>It stops with the window. No answered row is lost: you can resume it at the next start.</source>
            <translation>Se detiene con la ventana. No se pierde ninguna fila respondida: podrá reanudarla en el próximo inicio.</translation>
        </message>
        <message>
            <source>Stop it and close</source>
            <translation>Detenerla y cerrar</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>Hay {0} tarea por lotes en curso.</numerusform>
                <numerusform>Hay {0} tareas por lotes en curso.</numerusform>
            </translation>
        </message>
        <message>
            <source>They stop with the window. No answered row is lost: you can resume them at the next start.</source>
            <translation>Se detienen con la ventana. No se pierde ninguna fila respondida: podrá reanudarlas en el próximo inicio.</translation>
        </message>
        <message>
            <source>Stop them and close</source>
            <translation>Detenerlas y cerrar</translation>
        </message>
        <message>
            <source>Keep the window open</source>
            <translation>Mantener la ventana abierta</translation>
        </message>
    </context>
    <context>
        <name>SampleCard</name>
        <message>
            <source>Try the first rows</source>
            <translation>Probar las primeras filas</translation>
        </message>
        <message>
            <source>See the answers, and how fast they come, before you start the job.</source>
            <translation>Vea las respuestas, y lo rápido que llegan, antes de iniciar la tarea.</translation>
        </message>
        <message>
            <source>Answering…</source>
            <translation>Respondiendo…</translation>
        </message>
        <message>
            <source>Stopped.</source>
            <translation>Detenido.</translation>
        </message>
        <message>
            <source>Answer one row</source>
            <translation>Responder una fila</translation>
        </message>
        <message>
            <source>Answer two rows</source>
            <translation>Responder dos filas</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>Detener</translation>
        </message>
        <message>
            <source>Answer three rows</source>
            <translation>Responder tres filas</translation>
        </message>
    </context>
    <context>
        <name>SamplingPopover</name>
        <message>
            <source>Sampling</source>
            <translation>Muestreo</translation>
        </message>
        <message>
            <source>Recommended</source>
            <translation>Recomendado</translation>
        </message>
        <message>
            <source>Save as…</source>
            <translation>Guardar como…</translation>
        </message>
        <message>
            <source>Rename…</source>
            <translation>Renombrar…</translation>
        </message>
        <message>
            <source>Delete</source>
            <translation>Eliminar</translation>
        </message>
        <message>
            <source>Name of the preset</source>
            <translation>Nombre del preajuste</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Guardar</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>New chats begin with this</source>
            <translation>Los chats nuevos empiezan así</translation>
        </message>
        <message>
            <source>Use for new chats</source>
            <translation>Usar en chats nuevos</translation>
        </message>
        <message>
            <source>The model suggests nothing: {0}</source>
            <translation>El modelo no sugiere nada: {0}</translation>
        </message>
        <message>
            <source>As the model's makers suggest: {0}</source>
            <translation>Como sugieren los autores del modelo: {0}</translation>
        </message>
        <message>
            <source>{0}: {1}.</source>
            <translation>{0}: {1}.</translation>
        </message>
        <message>
            <source>Recommended: {0}.</source>
            <translation>Recomendado: {0}.</translation>
        </message>
    </context>
    <context>
        <name>SearchCard</name>
        <message>
            <source>Get a model</source>
            <translation>Obtener un modelo</translation>
        </message>
        <message>
            <source>Runs well here</source>
            <translation>Funciona bien aquí</translation>
        </message>
        <message>
            <source>Apache or MIT licence</source>
            <translation>Licencia Apache o MIT</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>Tamaño</translation>
        </message>
        <message>
            <source>Any size</source>
            <translation>Cualquier tamaño</translation>
        </message>
        <message>
            <source>Up to {0} GB</source>
            <translation>Hasta {0} GB</translation>
        </message>
        <message>
            <source>Good at</source>
            <translation>Bueno en</translation>
        </message>
        <message>
            <source>Good at anything</source>
            <translation>Para todo</translation>
        </message>
        <message>
            <source>Open its page</source>
            <translation>Abrir su página</translation>
        </message>
        <message>
            <source>Access token…</source>
            <translation>Token de acceso…</translation>
        </message>
        <message>
            <source>Looking at this machine…</source>
            <translation>Examinando esta máquina…</translation>
        </message>
        <message>
            <source>Nothing in the catalogue matches: press Enter to search the hub, or remove a filter.</source>
            <translation>No hay nada así en el catálogo: pulse Intro para buscar en el hub, o filtre menos.</translation>
        </message>
        <message>
            <source>The hub has nothing for “{0}”: try fewer words.</source>
            <translation>El hub no tiene nada para «{0}»: pruebe con menos palabras.</translation>
        </message>
        <message>
            <source>its makers ask you to accept their terms first</source>
            <translation>sus autores piden aceptar antes sus condiciones</translation>
        </message>
        <message>
            <source>Licence: {0}</source>
            <translation>Licencia: {0}</translation>
        </message>
        <message>
            <source>Searching…</source>
            <translation>Buscando…</translation>
        </message>
    </context>
    <context>
        <name>SearchLine</name>
        <message>
            <source>Name or words</source>
            <translation>Nombre o palabras</translation>
        </message>
        <message>
            <source>Filters the catalogue; Enter searches the hub, also for ORG/NAME or a link</source>
            <translation>Filtra el catálogo; Intro busca en el hub, también por ORG/NAME o un enlace</translation>
        </message>
        <message>
            <source>Search for a model</source>
            <translation>Buscar un modelo</translation>
        </message>
        <message>
            <source>Search</source>
            <translation>Buscar</translation>
        </message>
    </context>
    <context>
        <name>SecondTimeline</name>
        <message>
            <source>Second timeline</source>
            <translation>Segunda cronología</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>Predicted</source>
            <translation>Previsto</translation>
        </message>
    </context>
    <context>
        <name>ServedRequests</name>
        <message>
            <source>Time</source>
            <translation>Hora</translation>
        </message>
        <message>
            <source>Program</source>
            <translation>Programa</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modelo</translation>
        </message>
        <message>
            <source>Read</source>
            <translation>Leídos</translation>
        </message>
        <message>
            <source>Written</source>
            <translation>Escritos</translation>
        </message>
        <message>
            <source>Seconds</source>
            <translation>Segundos</translation>
        </message>
        <message>
            <source>Outcome</source>
            <translation>Resultado</translation>
        </message>
        <message>
            <source>answered</source>
            <translation>respondida</translation>
        </message>
        <message>
            <source>client left</source>
            <translation>cliente se fue</translation>
        </message>
        <message>
            <source>wrong key</source>
            <translation>clave errónea</translation>
        </message>
        <message>
            <source>refused ({0})</source>
            <translation>rechazada ({0})</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>error</translation>
        </message>
        <message>
            <source>{0}, {1}: {2}; {3} tokens read, {4} written, {5} s</source>
            <translation>{0}, {1}: {2}; {3} tokens leídos, {4} escritos, {5} s</translation>
        </message>
    </context>
    <context>
        <name>ServerDialog</name>
        <message>
            <source>Save</source>
            <translation>Guardar</translation>
        </message>
        <message>
            <source>Test</source>
            <translation>Probar</translation>
        </message>
        <message>
            <source>Add a server</source>
            <translation>Añadir un servidor</translation>
        </message>
        <message>
            <source>Address</source>
            <translation>Dirección</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>Nombre</translation>
        </message>
        <message>
            <source>same as its host</source>
            <translation>igual que su host</translation>
        </message>
        <message>
            <source>none</source>
            <translation>ninguno</translation>
        </message>
        <message>
            <source>as it is kept</source>
            <translation>tal como está guardada</translation>
        </message>
        <message>
            <source>Key</source>
            <translation>Clave</translation>
        </message>
        <message>
            <source>Certificate</source>
            <translation>Certificado</translation>
        </message>
        <message>
            <source>those that the system trusts</source>
            <translation>los del sistema</translation>
        </message>
        <message>
            <source>Choose…</source>
            <translation>Elegir…</translation>
        </message>
        <message>
            <source>Choose a certificate's file</source>
            <translation>Elegir un archivo de certificado</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modelo</translation>
        </message>
        <message>
            <source>Requests at once</source>
            <translation>Peticiones a la vez</translation>
        </message>
        <message>
            <source>as measured</source>
            <translation>según lo medido</translation>
        </message>
        <message>
            <source>Requests a minute</source>
            <translation>Peticiones por minuto</translation>
        </message>
        <message>
            <source>no limit</source>
            <translation>sin límite</translation>
        </message>
        <message>
            <source>Tokens a minute</source>
            <translation>Tokens por minuto</translation>
        </message>
        <message>
            <source>Price of a million tokens read</source>
            <translation>Precio de un millón de tokens leídos</translation>
        </message>
        <message>
            <source>Price of a million tokens written</source>
            <translation>Precio de un millón de tokens escritos</translation>
        </message>
        <message>
            <source>Currency</source>
            <translation>Moneda</translation>
        </message>
        <message>
            <source>Trust its certificate…</source>
            <translation>Confiar en su certificado…</translation>
        </message>
        <message>
            <source>Per million tokens read</source>
            <translation>Por millón de tokens leídos</translation>
        </message>
        <message>
            <source>Per million tokens written</source>
            <translation>Por millón de tokens escritos</translation>
        </message>
        <message>
            <source>price not known</source>
            <translation>precio desconocido</translation>
        </message>
        <message>
            <source>Chosen in each chat</source>
            <translation>Se elige en cada chat</translation>
        </message>
        <message>
            <source>Less</source>
            <translation>Menos</translation>
        </message>
        <message>
            <source>More: certificate, model, limits and prices</source>
            <translation>Más: certificado, modelo, límites y precios</translation>
        </message>
        <message>
            <source>It is tested before it is kept: that asks a model for a few tokens. The key is kept in the system's keyring, or for this run only where there is none.</source>
            <translation>Se prueba antes de guardarlo: para ello se piden unos tokens a un modelo. La clave se guarda en el llavero del sistema o, si no lo hay, solo durante esta ejecución.</translation>
        </message>
        <message>
            <source>Asking {0}…</source>
            <translation>Preguntando a {0}…</translation>
        </message>
        <message>
            <source>It answers in {0} ms.</source>
            <translation>Responde en {0} ms.</translation>
        </message>
        <message>
            <source>It answers in {0} ms; the first token came after {1} s.</source>
            <translation>Responde en {0} ms; el primer token llegó a los {1} s.</translation>
        </message>
        <message>
            <source>Choose a model and test again to see what it can do.</source>
            <translation>Elija un modelo y pruebe de nuevo para ver qué sabe hacer.</translation>
        </message>
        <message>
            <source>Its fingerprint (SHA-256) is
{0}
Compare it with what that server shows: “switchyard serve --https” prints it. Only this certificate is trusted for this server then.</source>
            <translation>Su huella (SHA-256) es
{0}
Compárela con la que muestra ese servidor: «switchyard serve --https» la imprime. Para este servidor solo se confiará entonces en este certificado.</translation>
        </message>
        <message>
            <source>Trust the certificate of {0}?</source>
            <translation>¿Confiar en el certificado de {0}?</translation>
        </message>
        <message>
            <source>Trust it</source>
            <translation>Confiar</translation>
        </message>
        <message>
            <source>Certificates (*.pem *.crt *.cer)</source>
            <translation>Certificados (*.pem *.crt *.cer)</translation>
        </message>
        <message>
            <source>The server's certificate</source>
            <translation>El certificado del servidor</translation>
        </message>
    </context>
    <context>
        <name>Servers</name>
        <message>
            <source>Not tested yet.</source>
            <translation>Aún sin probar.</translation>
        </message>
        <message>
            <source>A server with OpenAI's interface</source>
            <translation>Un servidor con la interfaz de OpenAI</translation>
        </message>
        <message>
            <source>no model</source>
            <translation>ningún modelo</translation>
        </message>
        <message>
            <source>{0} and {1} more</source>
            <translation>{0} y {1} más</translation>
        </message>
        <message>
            <source>{0} or {1}</source>
            <translation>{0} o {1}</translation>
        </message>
        <message>
            <source>It cannot {0}.</source>
            <translation>No puede: {0}.</translation>
        </message>
        <message>
            <source>Models that read text only, no pictures: {0}.</source>
            <translation>Modelos que solo leen texto, no imágenes: {0}.</translation>
        </message>
        <message>
            <source>It reads text only, no pictures.</source>
            <translation>Solo lee texto, no imágenes.</translation>
        </message>
        <message>
            <source>send answers as they are written</source>
            <translation>enviar las respuestas mientras se escriben</translation>
        </message>
        <message>
            <source>count tokens</source>
            <translation>contar tokens</translation>
        </message>
        <message>
            <source>call tools</source>
            <translation>llamar a herramientas</translation>
        </message>
        <message>
            <source>keep to a schema</source>
            <translation>ceñirse a un esquema</translation>
        </message>
        <message>
            <source>take top-k, min-p or a repetition penalty</source>
            <translation>admitir top-k, min-p o una penalización por repetición</translation>
        </message>
        <message>
            <source>{0} at once</source>
            <translation>{0} a la vez</translation>
        </message>
        <message>
            <source>{0} requests a minute</source>
            <translation>{0} peticiones por minuto</translation>
        </message>
        <message>
            <source>{0} tokens a minute</source>
            <translation>{0} tokens por minuto</translation>
        </message>
        <message>
            <source>a million tokens read: {0}{1}</source>
            <translation>un millón de tokens leídos: {0}{1}</translation>
        </message>
        <message>
            <source>written: {0}{1}</source>
            <translation>escritos: {0}{1}</translation>
        </message>
    </context>
    <context>
        <name>ServersCard</name>
        <message>
            <source>Remote servers</source>
            <translation>Servidores remotos</translation>
        </message>
        <message>
            <source>Add…</source>
            <translation>Añadir…</translation>
        </message>
        <message>
            <source>Add a server</source>
            <translation>Añadir un servidor</translation>
        </message>
        <message>
            <source>vLLM, SGLang, llama.cpp, Ollama, another Switchyard. Text goes to one only in chats and jobs where you choose it.</source>
            <translation>vLLM, SGLang, llama.cpp, Ollama, otro Switchyard. Solo se envía texto a uno en los chats y tareas donde usted lo elija.</translation>
        </message>
        <message>
            <source>Look on this network</source>
            <translation>Buscar en esta red</translation>
        </message>
        <message>
            <source>Models that run elsewhere</source>
            <translation>Modelos que se ejecutan en otro lugar</translation>
        </message>
        <message>
            <source>Looking…</source>
            <translation>Buscando…</translation>
        </message>
        <message>
            <source>No Switchyard answered. One does if it was started with “switchyard serve --host 0.0.0.0 --https --announce NAME” in this network.</source>
            <translation>No respondió ningún Switchyard. Responde si en esta red se inició con «switchyard serve --host 0.0.0.0 --https --announce NAME».</translation>
        </message>
        <message>
            <source>All that answered are in the list.</source>
            <translation>Todos los que respondieron están en la lista.</translation>
        </message>
        <message>
            <source>Add {0}</source>
            <translation>Añadir {0}</translation>
        </message>
        <message>
            <source>Found on this network · {0}</source>
            <translation>Encontrado en esta red · {0}</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>Editar…</translation>
        </message>
        <message>
            <source>Edit {0}</source>
            <translation>Editar {0}</translation>
        </message>
        <message>
            <source>Remove</source>
            <translation>Quitar</translation>
        </message>
        <message>
            <source>Remove {0}</source>
            <translation>Quitar {0}</translation>
        </message>
        <message>
            <source>Its key is removed, too. Chats that were held with it stay; nothing else answers in them by itself.</source>
            <translation>También se quita su clave. Los chats mantenidos con él permanecen; nada más responde en ellos por sí solo.</translation>
        </message>
        <message>
            <source>Remove {0}?</source>
            <translation>¿Quitar {0}?</translation>
        </message>
    </context>
    <context>
        <name>SessionsButton</name>
        <message>
            <source>Sessions</source>
            <translation>Sesiones</translation>
        </message>
        <message>
            <source>Reading…</source>
            <translation>Leyendo…</translation>
        </message>
        <message>
            <source>None yet: ask something in Chat</source>
            <translation>Ninguna todavía: pregunte algo en Chat</translation>
        </message>
        <message>
            <source>Open</source>
            <translation>Abrir</translation>
        </message>
        <message>
            <source>Compare with</source>
            <translation>Comparar con</translation>
        </message>
        <message>
            <source>The session could not be read.</source>
            <translation>No se pudo leer la sesión.</translation>
        </message>
    </context>
    <context>
        <name>Setting</name>
        <message>
            <source>Automatic</source>
            <translation>Automático</translation>
        </message>
        <message>
            <source>Speed and memory</source>
            <translation>Velocidad y memoria</translation>
        </message>
        <message>
            <source>Runs on</source>
            <translation>Se ejecuta en</translation>
        </message>
        <message>
            <source>Automatic takes the graphics card, if there is one, and the processor for what does not fit.</source>
            <translation>«Automático» usa la tarjeta gráfica, si la hay, y el procesador para lo que no quepa.</translation>
        </message>
        <message>
            <source>Processor only</source>
            <translation>Solo procesador</translation>
        </message>
        <message>
            <source>Precision</source>
            <translation>Precisión</translation>
        </message>
        <message>
            <source>Automatic keeps the best that fits. Lower precision takes less memory and is faster.</source>
            <translation>«Automático» conserva la mejor que quepa. Los pesos más burdos ocupan menos memoria y son más rápidos.</translation>
        </message>
        <message>
            <source>Graphics memory to use</source>
            <translation>Memoria gráfica que usar</translation>
        </message>
        <message>
            <source>For experts that are used often; the rest is left to other programs.</source>
            <translation>Para los expertos más usados; el resto queda para otros programas.</translation>
        </message>
        <message>
            <source>RAM to use</source>
            <translation>RAM que usar</translation>
        </message>
        <message>
            <source>For the model; what does not fit is read from the disk again and again.</source>
            <translation>Para el modelo; lo que no cabe se lee del disco una y otra vez.</translation>
        </message>
        <message>
            <source>CPU threads</source>
            <translation>Hilos de CPU</translation>
        </message>
        <message>
            <source>Automatic uses one per core. Fewer leave room for other programs.</source>
            <translation>«Automático» usa uno por núcleo. Menos hilos dejan sitio a otros programas.</translation>
        </message>
        <message>
            <source>For experts</source>
            <translation>Para expertos</translation>
        </message>
        <message>
            <source>Experts on each card</source>
            <translation>Expertos en cada tarjeta</translation>
        </message>
        <message>
            <source>Automatic keeps as many as fit; 0 keeps none.</source>
            <translation>Automático guarda tantos como quepan; 0 no guarda ninguno.</translation>
        </message>
        <message>
            <source>Slots for each layer</source>
            <translation>Huecos por capa</translation>
        </message>
        <message>
            <source>Automatic lets all layers share the slots; a number gives each layer that many of its own.</source>
            <translation>En automático, todas las capas comparten los huecos; un número da a cada capa esa cantidad propia.</translation>
        </message>
        <message>
            <source>Which experts stay on the card</source>
            <translation>Qué expertos se quedan en la tarjeta</translation>
        </message>
        <message>
            <source>Automatic watches which rule would have kept the right ones, and takes that one.</source>
            <translation>«Automático» observa qué regla habría conservado los correctos y la adopta.</translation>
        </message>
        <message>
            <source>Recently used ones</source>
            <translation>Los usados hace poco</translation>
        </message>
        <message>
            <source>Newest ones</source>
            <translation>Los más nuevos</translation>
        </message>
        <message>
            <source>Often used ones</source>
            <translation>Los más usados</translation>
        </message>
        <message>
            <source>Recently and often used ones</source>
            <translation>Los recientes y más usados</translation>
        </message>
        <message>
            <source>Random ones</source>
            <translation>Al azar</translation>
        </message>
        <message>
            <source>Popular ones, fixed</source>
            <translation>Los más populares, fijos</translation>
        </message>
        <message>
            <source>Experts that are not on the card</source>
            <translation>Expertos que no están en la tarjeta</translation>
        </message>
        <message>
            <source>All but the first are for comparisons.</source>
            <translation>Todas menos la primera son para comparar.</translation>
        </message>
        <message>
            <source>Whichever is faster</source>
            <translation>Lo más rápido</translation>
        </message>
        <message>
            <source>Processor computes</source>
            <translation>Calcula el procesador</translation>
        </message>
        <message>
            <source>Card fetches</source>
            <translation>La tarjeta los trae</translation>
        </message>
        <message>
            <source>Nothing is kept</source>
            <translation>No se guarda nada</translation>
        </message>
        <message>
            <source>Whole layers</source>
            <translation>Capas enteras</translation>
        </message>
        <message>
            <source>Guessing which experts come next</source>
            <translation>Adivinar qué expertos siguen</translation>
        </message>
        <message>
            <source>Guessed experts are copied to the card in advance. Automatic uses what pays off, if anything does.</source>
            <translation>Los expertos previstos se copian antes a la tarjeta. Automático usa lo que compensa, si algo compensa.</translation>
        </message>
        <message>
            <source>Off</source>
            <translation>Desactivado</translation>
        </message>
        <message>
            <source>Those of the last token</source>
            <translation>Los del último token</translation>
        </message>
        <message>
            <source>The next layer’s router</source>
            <translation>El router de la capa siguiente</translation>
        </message>
        <message>
            <source>What usually follows</source>
            <translation>Lo que suele seguir</translation>
        </message>
        <message>
            <source>A trained predictor</source>
            <translation>Un predictor entrenado</translation>
        </message>
        <message>
            <source>Replay steps on the card</source>
            <translation>Reproducir pasos en la tarjeta</translation>
        </message>
        <message>
            <source>The card replays a recorded step (a CUDA graph) instead of being told each operation.</source>
            <translation>La tarjeta reproduce un paso grabado (un grafo CUDA) en vez de recibir cada operación.</translation>
        </message>
        <message>
            <source>On</source>
            <translation>Activado</translation>
        </message>
        <message>
            <source>Several graphics cards</source>
            <translation>Varias tarjetas gráficas</translation>
        </message>
        <message>
            <source>By layers, each card has a run of layers; by experts, each has a part of every layer’s experts.</source>
            <translation>Por capas, cada tarjeta tiene una serie de capas; por expertos, cada una tiene parte de los expertos de cada capa.</translation>
        </message>
        <message>
            <source>By layers</source>
            <translation>Por capas</translation>
        </message>
        <message>
            <source>By experts</source>
            <translation>Por expertos</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modelo</translation>
        </message>
        <message>
            <source>Speculative decoding</source>
            <translation>Decodificación especulativa</translation>
        </message>
        <message>
            <source>Answers that quote, such as edits of a text, come faster: likely next words are tried together, only as long as that pays. Answers stay the same.</source>
            <translation>Las respuestas que citan, como las que editan un texto, llegan antes: se prueban juntas las palabras siguientes probables, solo mientras compense. Las respuestas no cambian.</translation>
        </message>
        <message>
            <source>Where it pays</source>
            <translation>Donde compensa</translation>
        </message>
        <message>
            <source>With the model’s own layer</source>
            <translation>Con la capa del modelo</translation>
        </message>
        <message>
            <source>Keys and values</source>
            <translation>Claves y valores</translation>
        </message>
        <message>
            <source>What the model keeps of a conversation. int8 takes about half the memory; answers may differ slightly (with the starter, perplexity rose by 0.08%).</source>
            <translation>Lo que el modelo guarda de una conversación. int8 ocupa cerca de la mitad de memoria; las respuestas pueden variar ligeramente (con el modelo inicial, la perplejidad subió un 0,08 %).</translation>
        </message>
        <message>
            <source>As in the model</source>
            <translation>Como en el modelo</translation>
        </message>
        <message>
            <source>Appearance</source>
            <translation>Apariencia</translation>
        </message>
        <message>
            <source>Theme</source>
            <translation>Tema</translation>
        </message>
        <message>
            <source>System follows the desktop's setting.</source>
            <translation>«Sistema» sigue el ajuste del escritorio.</translation>
        </message>
        <message>
            <source>System</source>
            <translation>Sistema</translation>
        </message>
        <message>
            <source>Light</source>
            <translation>Claro</translation>
        </message>
        <message>
            <source>Dark</source>
            <translation>Oscuro</translation>
        </message>
        <message>
            <source>Language</source>
            <translation>Idioma</translation>
        </message>
        <message>
            <source>System is the language of this PC, or English.</source>
            <translation>«Sistema» es el idioma de este PC o, si no, inglés.</translation>
        </message>
        <message>
            <source>Text size</source>
            <translation>Tamaño del texto</translation>
        </message>
        <message>
            <source>Of everything in this window.</source>
            <translation>De todo en esta ventana.</translation>
        </message>
        <message>
            <source>Default model</source>
            <translation>Modelo predeterminado</translation>
        </message>
        <message>
            <source>Loaded when Switchyard starts.</source>
            <translation>Se carga al iniciar Switchyard.</translation>
        </message>
        <message>
            <source>Free the memory after</source>
            <translation>Liberar la memoria tras</translation>
        </message>
        <message>
            <source>If the model is not used for this long; the next question loads it again.</source>
            <translation>Si nadie usa el modelo durante ese tiempo; la siguiente pregunta lo carga de nuevo.</translation>
        </message>
        <message>
            <source>Never</source>
            <translation>Nunca</translation>
        </message>
        <message>
            <source>Batch jobs at once</source>
            <translation>Tareas por lotes a la vez</translation>
        </message>
        <message>
            <source>They share each pass through the model; others wait for their turn.</source>
            <translation>Comparten cada pasada por el modelo; las demás esperan su turno.</translation>
        </message>
        <message>
            <source>Quick question</source>
            <translation>Pregunta rápida</translation>
        </message>
        <message>
            <source>Icon in the tray</source>
            <translation>Icono en el área de notificación</translation>
        </message>
        <message>
            <source>Click it to ask a question from anywhere, in a small window above the others.</source>
            <translation>Un clic en él hace una pregunta desde cualquier lugar, en una ventana pequeña sobre las demás.</translation>
        </message>
        <message>
            <source>Keep running when the window is closed</source>
            <translation>Seguir en marcha al cerrar la ventana</translation>
        </message>
        <message>
            <source>The model stays in memory, and answers and batch jobs go on. Quit from the icon’s menu or with Ctrl+Q.</source>
            <translation>El modelo sigue en memoria; las respuestas y tareas por lotes continúan. Salga desde el menú del icono o con Ctrl+Q.</translation>
        </message>
        <message>
            <source>API server</source>
            <translation>Servidor de API</translation>
        </message>
        <message>
            <source>Let apps use the models of this PC</source>
            <translation>Permitir que otras apps usen los modelos de este PC</translation>
        </message>
        <message>
            <source>Who may use it</source>
            <translation>Quién puede usarlo</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>Este PC</translation>
        </message>
        <message>
            <source>This PC, with key</source>
            <translation>Este PC, con clave</translation>
        </message>
        <message>
            <source>Network, with key</source>
            <translation>Red, con clave</translation>
        </message>
        <message>
            <source>Port</source>
            <translation>Puerto</translation>
        </message>
        <message>
            <source>Choose another if a program on this PC already uses it.</source>
            <translation>Otro, si un programa de aquí ya lo usa.</translation>
        </message>
        <message>
            <source>Free them after</source>
            <translation>Liberarlos tras</translation>
        </message>
        <message>
            <source>A model that a program asked for is freed once no program has used it for this long.</source>
            <translation>Un modelo pedido por un programa se libera cuando ningún programa lo ha usado durante ese tiempo.</translation>
        </message>
        <message>
            <source>Keep loaded</source>
            <translation>Mantener cargados</translation>
        </message>
        <message>
            <source>My model makes room for them</source>
            <translation>Mi modelo les hace sitio</translation>
        </message>
        <message>
            <source>Where both do not fit, yours is put aside, and loaded again for your next question.</source>
            <translation>Si no caben los dos, el suyo se aparta y se carga de nuevo con su siguiente pregunta.</translation>
        </message>
        <message>
            <source>Monitor</source>
            <translation>Monitor</translation>
        </message>
        <message>
            <source>Record sessions</source>
            <translation>Grabar sesiones</translation>
        </message>
        <message>
            <source>Timings and counters that the Monitor can open later: no prompts, no answers. They stay on this machine and take up to 512 MB; the oldest are deleted.</source>
            <translation>Tiempos y contadores que el Monitor puede abrir después: sin prompts ni respuestas. Se quedan en esta máquina y ocupan hasta 512 MB; se eliminan los más antiguos.</translation>
        </message>
        <message>
            <source>Updates</source>
            <translation>Actualizaciones</translation>
        </message>
        <message>
            <source>Check for updates</source>
            <translation>Buscar actualizaciones</translation>
        </message>
        <message>
            <source>Once a day, at the start. Nothing about you is sent, and nothing is downloaded without asking.</source>
            <translation>Una vez al día, al iniciar. No se envía nada sobre usted ni se descarga nada sin preguntar.</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>Temperatura</translation>
        </message>
        <message>
            <source>0 always takes the likeliest token; higher is more varied</source>
            <translation>0 toma siempre el token más probable; más alto es más variado</translation>
        </message>
        <message>
            <source>Top-k</source>
            <translation>Top-k</translation>
        </message>
        <message>
            <source>Sample from the k likeliest tokens</source>
            <translation>Elegir entre los k tokens más probables</translation>
        </message>
        <message>
            <source>off</source>
            <translation>desactivado</translation>
        </message>
        <message>
            <source>Top-p</source>
            <translation>Top-p</translation>
        </message>
        <message>
            <source>Sample from the likeliest tokens with a total probability of p; 1 is off</source>
            <translation>Elegir entre los tokens más probables con una probabilidad total de p; 1 lo desactiva</translation>
        </message>
        <message>
            <source>Min-p</source>
            <translation>Min-p</translation>
        </message>
        <message>
            <source>Drop tokens below this share of the likeliest one's probability; 0 is off</source>
            <translation>Descartar tokens por debajo de esta parte de la probabilidad del más probable; 0 lo desactiva</translation>
        </message>
        <message>
            <source>Repetition penalty</source>
            <translation>Penal. repetición</translation>
        </message>
        <message>
            <source>Above 1, tokens already used become less likely; 1 is off</source>
            <translation>Por encima de 1, los tokens ya usados son menos probables; 1 lo desactiva</translation>
        </message>
        <message>
            <source>Seed</source>
            <translation>Semilla</translation>
        </message>
        <message>
            <source>The same seed gives the same answer to the same chat</source>
            <translation>La misma semilla da la misma respuesta en el mismo chat</translation>
        </message>
        <message>
            <source>random</source>
            <translation>aleatoria</translation>
        </message>
        <message>
            <source>Stop strings</source>
            <translation>Textos de parada</translation>
        </message>
        <message>
            <source>An answer ends before the first of these</source>
            <translation>Una respuesta termina antes del primero de ellos</translation>
        </message>
        <message>
            <source>Max tokens</source>
            <translation>Tokens máx.</translation>
        </message>
        <message>
            <source>Answers stop at this length</source>
            <translation>Las respuestas terminan con esta longitud</translation>
        </message>
        <message>
            <source>Beams</source>
            <translation>Haces</translation>
        </message>
        <message>
            <source>Beam search if above 1; ignores temperature, top-k, top-p and min-p</source>
            <translation>Búsqueda por haz si es mayor que 1; ignora temperatura, top-k, top-p y min-p</translation>
        </message>
        <message>
            <source>Loop guard</source>
            <translation>Antibucles</translation>
        </message>
        <message>
            <source>Ends loops (DRY): what would repeat earlier text becomes less likely; 0 is off, 0.8 is usual</source>
            <translation>Acaba con los bucles (DRY): lo que repetiría texto anterior es menos probable; 0 lo desactiva, 0,8 es habitual</translation>
        </message>
        <message>
            <source>Guard: growth</source>
            <translation>Bucles: aumento</translation>
        </message>
        <message>
            <source>How much stronger the loop guard gets with each repeated token</source>
            <translation>Cuánto se refuerza el antibucles con cada token repetido</translation>
        </message>
        <message>
            <source>Guard: length</source>
            <translation>Bucles: longitud</translation>
        </message>
        <message>
            <source>Repetitions shorter than this many tokens are free</source>
            <translation>Las repeticiones más cortas que este número de tokens son libres</translation>
        </message>
        <message>
            <source>Guard: range</source>
            <translation>Bucles: alcance</translation>
        </message>
        <message>
            <source>How many of the last tokens, earlier messages included, are searched; by default only the answer</source>
            <translation>Cuántos de los últimos tokens se examinan, con los mensajes anteriores; de forma predeterminada, solo la respuesta</translation>
        </message>
        <message>
            <source>answer</source>
            <translation>respuesta</translation>
        </message>
        <message>
            <source>Guard: ends at</source>
            <translation>Bucles: acaba en</translation>
        </message>
        <message>
            <source>Repetitions are not followed across these texts; \n is a line break</source>
            <translation>Las repeticiones no se siguen más allá de estos textos; \n es un salto de línea</translation>
        </message>
        <message>
            <source>Presence penalty</source>
            <translation>Penal. presencia</translation>
        </message>
        <message>
            <source>Makes every token that the answer has already less likely, once; 0 is off</source>
            <translation>Hace menos probable, una vez, cada token que la respuesta ya tiene; 0 lo desactiva</translation>
        </message>
        <message>
            <source>Frequency penalty</source>
            <translation>Penal. frecuencia</translation>
        </message>
        <message>
            <source>Makes tokens less likely with each time that the answer has them already; 0 is off</source>
            <translation>Hace menos probable un token por cada vez que la respuesta ya lo tiene; 0 lo desactiva</translation>
        </message>
        <message>
            <source>Thinking</source>
            <translation>Razonamiento</translation>
        </message>
        <message>
            <source>Whether the model reasons before it answers; its thoughts count as tokens of the answer</source>
            <translation>Si el modelo razona antes de responder; sus pensamientos cuentan como tokens de la respuesta</translation>
        </message>
        <message>
            <source>As the model does</source>
            <translation>Como disponga el modelo</translation>
        </message>
        <message>
            <source>Low</source>
            <translation>Bajo</translation>
        </message>
        <message>
            <source>Medium</source>
            <translation>Medio</translation>
        </message>
        <message>
            <source>High</source>
            <translation>Alto</translation>
        </message>
        <message>
            <source>Keep chats' computed context on disk</source>
            <translation>Guardar en disco el contexto calculado de los chats</translation>
        </message>
        <message>
            <source>A chat then goes on at once after another one or a restart: what the model has read need not be read again. It is made of your prompts and answers, encrypted, and removed with its chat. The key is in the system's keyring; where there is none it is a file beside the settings, and whoever can read your files can decrypt it. Turning this off removes what is kept.</source>
            <translation>Así un chat continúa al instante después de otro o de un reinicio: lo que el modelo ha leído no hay que leerlo otra vez. Se compone de sus prompts y respuestas, está cifrado y se elimina con su chat. La clave está en el llavero del sistema; si no lo hay, es un archivo junto a la configuración, y quien pueda leer sus archivos podrá descifrarlo. Al desactivarlo se elimina lo guardado.</translation>
        </message>
        <message>
            <source>At most</source>
            <translation>Como máximo</translation>
        </message>
        <message>
            <source>What was of no use for longest is removed first. 2 GB of the disk always stay free.</source>
            <translation>Lo que lleva más tiempo sin servir se elimina primero. Siempre quedan libres 2 GB del disco.</translation>
        </message>
    </context>
    <context>
        <name>Settings</name>
        <message>
            <source>The settings could not be saved to {0} ({1}); free some space or check its permissions.</source>
            <translation>No se pudo guardar la configuración en {0} ({1}); libere espacio o compruebe los permisos.</translation>
        </message>
        <message>
            <source>The settings in {0} could not be read ({1}), so the defaults are used.</source>
            <translation>No se pudo leer la configuración de {0} ({1}), así que se usan los valores predeterminados.</translation>
        </message>
        <message>
            <source>Some settings in {0} make no sense ({1}): the usual ones are used instead of these.</source>
            <translation>Algunos ajustes de {0} no tienen sentido ({1}): en su lugar se usan los habituales.</translation>
        </message>
        <message>
            <source>The settings file was damaged; it is kept as {0}, and the defaults are used.</source>
            <translation>El archivo de configuración estaba dañado; se conserva como {0} y se usan los valores predeterminados.</translation>
        </message>
    </context>
    <context>
        <name>SettingsCard</name>
        <message>
            <source>Hide</source>
            <translation>Ocultar</translation>
        </message>
        <message>
            <source>Show</source>
            <translation>Mostrar</translation>
        </message>
        <message>
            <source>Needs a reload.</source>
            <translation>Requiere recargar.</translation>
        </message>
        <message>
            <source>Needs a restart.</source>
            <translation>Requiere reiniciar.</translation>
        </message>
        <message>
            <source>{0} px</source>
            <translation>{0} px</translation>
        </message>
        <message>
            <source>all that is free</source>
            <translation>todo lo que esté libre</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>como mucho {0}</translation>
        </message>
        <message>
            <source>none; separate with commas</source>
            <translation>ninguno; sepárelos con comas</translation>
        </message>
    </context>
    <context>
        <name>SettingsPage</name>
        <message>
            <source>This desktop has no tray for icons.</source>
            <translation>Este escritorio no tiene área de notificación.</translation>
        </message>
        <message>
            <source>No setting has these words.</source>
            <translation>Ningún ajuste contiene estas palabras.</translation>
        </message>
        <message>
            <source>Find a setting</source>
            <translation>Buscar un ajuste</translation>
        </message>
        <message>
            <source>Settings</source>
            <translation>Configuración</translation>
        </message>
    </context>
    <context>
        <name>SharedSettingsCard</name>
        <message>
            <source>Template</source>
            <translation>Plantilla</translation>
        </message>
        <message>
            <source>Input</source>
            <translation>Entrada</translation>
        </message>
        <message>
            <source>Result</source>
            <translation>Resultado</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modelo</translation>
        </message>
        <message>
            <source>Answered by</source>
            <translation>Respondido por</translation>
        </message>
        <message>
            <source>Max tokens</source>
            <translation>Tokens máx.</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>Temperatura</translation>
        </message>
        <message>
            <source>Answer must be</source>
            <translation>Forma de la respuesta</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>Prompt del sistema</translation>
        </message>
        <message>
            <source>Each row's own messages</source>
            <translation>Los mensajes propios de cada fila</translation>
        </message>
        <message>
            <source>JSON with a schema</source>
            <translation>JSON con un esquema</translation>
        </message>
        <message>
            <source>one of {0}</source>
            <translation>una de {0}</translation>
        </message>
        <message>
            <source>text</source>
            <translation>texto</translation>
        </message>
        <message>
            <source>0 (the likeliest token)</source>
            <translation>0 (el token más probable)</translation>
        </message>
        <message>
            <source>none</source>
            <translation>ninguno</translation>
        </message>
        <message>
            <source>the servers' own</source>
            <translation>los del servidor</translation>
        </message>
        <message>
            <source>the loaded one</source>
            <translation>el que está cargado</translation>
        </message>
        <message>
            <source>this PC</source>
            <translation>este PC</translation>
        </message>
        <message>
            <source>the Ray cluster at {0}</source>
            <translation>el clúster de Ray en {0}</translation>
        </message>
    </context>
    <context>
        <name>ShortcutsDialog</name>
        <message>
            <source>Keyboard shortcuts</source>
            <translation>Atajos de teclado</translation>
        </message>
    </context>
    <context>
        <name>SideBySide</name>
        <message>
            <source>Side by side</source>
            <translation>En paralelo</translation>
        </message>
        <message>
            <source>Question for both</source>
            <translation>Pregunta para ambos</translation>
        </message>
        <message>
            <source>One question for both</source>
            <translation>Una pregunta para ambos</translation>
        </message>
        <message>
            <source>Ask both</source>
            <translation>Preguntar a ambos</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>The model here</source>
            <translation>El modelo de aquí</translation>
        </message>
        <message>
            <source>its only model</source>
            <translation>su único modelo</translation>
        </message>
        <message>
            <source>This chat is being answered: wait for the end, or stop it.</source>
            <translation>Se está respondiendo en este chat: espere al final o deténgalo.</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>Detener</translation>
        </message>
        <message>
            <source>Choose another model or other settings for one of them.</source>
            <translation>Elija otro modelo u otros ajustes para uno de ellos.</translation>
        </message>
        <message>
            <source>One model is open at a time on this PC: the second is loaded when the first has answered.</source>
            <translation>En este PC solo hay un modelo abierto a la vez: el segundo se carga cuando el primero ha respondido.</translation>
        </message>
        <message>
            <source>Both answers are kept in the chat, as versions of one turn.</source>
            <translation>Ambas respuestas se guardan en el chat, como versiones de un mismo mensaje.</translation>
        </message>
    </context>
    <context>
        <name>Sidebar</name>
        <message>
            <source>Navigation</source>
            <translation>Navegación</translation>
        </message>
        <message>
            <source>Go to {0}</source>
            <translation>Ir a {0}</translation>
        </message>
    </context>
    <context>
        <name>SizeChooser</name>
        <message>
            <source>Experts kept in this tier</source>
            <translation>Expertos guardados en este nivel</translation>
        </message>
        <message>
            <source>Experts kept</source>
            <translation>Expertos guardados</translation>
        </message>
        <message>
            <source>Resize</source>
            <translation>Cambiar tamaño</translation>
        </message>
        <message>
            <source>Lasts until the model is reloaded; Tune sets a permanent size.</source>
            <translation>Dura hasta que se recargue el modelo; Optimizar fija un tamaño permanente.</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Deshacer</translation>
        </message>
    </context>
    <context>
        <name>SourceRow</name>
        <message>
            <source>Sources</source>
            <translation>Fuentes</translation>
        </message>
        <message>
            <source> p. {0}</source>
            <translation> p. {0}</translation>
        </message>
        <message>
            <source>Source {0}: {1}</source>
            <translation>Fuente {0}: {1}</translation>
        </message>
    </context>
    <context>
        <name>StarterDownload</name>
        <message>
            <source>The download could not be started: reinstall Switchyard.</source>
            <translation>No se pudo iniciar la descarga: reinstale Switchyard.</translation>
        </message>
        <message>
            <source>The starter model could not be built; try again.</source>
            <translation>No se pudo construir el modelo inicial; inténtelo de nuevo.</translation>
        </message>
    </context>
    <context>
        <name>StarterOffer</name>
        <message>
            <source>Download of the starter model</source>
            <translation>Descarga del modelo inicial</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>Reintentar</translation>
        </message>
        <message>
            <source>Get the starter (93 MB)</source>
            <translation>Obtener el modelo inicial (93 MB)</translation>
        </message>
        <message>
            <source>Getting the starter model…</source>
            <translation>Obteniendo el modelo inicial…</translation>
        </message>
        <message>
            <source>Stopping…</source>
            <translation>Deteniendo…</translation>
        </message>
        <message>
            <source>Getting the starter model, {0}% done…</source>
            <translation>Obteniendo el modelo inicial, {0} % hecho…</translation>
        </message>
    </context>
    <context>
        <name>StepBar</name>
        <message>
            <source>Steps</source>
            <translation>Pasos</translation>
        </message>
        <message>
            <source>Your machine</source>
            <translation>Su máquina</translation>
        </message>
        <message>
            <source>Measure</source>
            <translation>Medir</translation>
        </message>
        <message>
            <source>Plan</source>
            <translation>Plan</translation>
        </message>
        <message>
            <source>Timed tokens</source>
            <translation>Cronometraje</translation>
        </message>
        <message>
            <source>Step {0}: {1}</source>
            <translation>Paso {0}: {1}</translation>
        </message>
        <message>
            <source>Alt+{0}</source>
            <translation>Alt+{0}</translation>
        </message>
    </context>
    <context>
        <name>SummaryCard</name>
        <message>
            <source>Open Tune</source>
            <translation>Abrir Optimizar</translation>
        </message>
        <message>
            <source>The engine is starting.</source>
            <translation>El motor se está iniciando.</translation>
        </message>
        <message>
            <source>The model is loading.</source>
            <translation>El modelo se está cargando.</translation>
        </message>
        <message>
            <source>The engine has stopped.</source>
            <translation>El motor se ha detenido.</translation>
        </message>
        <message>
            <source>Its recording is still here; the machine's lanes continue.</source>
            <translation>Su grabación sigue aquí; las pistas de la máquina continúan.</translation>
        </message>
        <message>
            <source>Nothing computed yet.</source>
            <translation>Aún no se ha calculado nada.</translation>
        </message>
        <message>
            <source>Ask something in Chat and watch it here.</source>
            <translation>Pregunte algo en Chat y obsérvelo aquí.</translation>
        </message>
        <message>
            <source>No model is loaded.</source>
            <translation>No hay ningún modelo cargado.</translation>
        </message>
        <message>
            <source>The machine is still shown. Load a model in Settings, then ask something in Chat.</source>
            <translation>La máquina se sigue mostrando. Cargue un modelo en Configuración y pregunte algo en Chat.</translation>
        </message>
        <message>
            <source>Nothing was decoded in this session.</source>
            <translation>En esta sesión no se decodificó nada.</translation>
        </message>
        <message>
            <source>Nothing has been decoded yet.</source>
            <translation>Aún no se ha decodificado nada.</translation>
        </message>
        <message>
            <source>Their time went to: {0}.</source>
            <translation>Su tiempo se fue en: {0}.</translation>
        </message>
        <message>
            <source>Its time went to: {0}.</source>
            <translation>Su tiempo se fue en: {0}.</translation>
        </message>
        <message>
            <source>Other programs used {0}% of the CPU, which slows everything down.</source>
            <translation>Otros programas usaron el {0} % de la CPU, lo que lo ralentiza todo.</translation>
        </message>
        <message>
            <source>A picture was read first, in {0} s.</source>
            <translation>Antes se leyó una imagen, en {0} s.</translation>
        </message>
        <message>
            <source>{0} pictures were read first, in {1} s.</source>
            <translation>Antes se leyeron {0} imágenes, en {1} s.</translation>
        </message>
        <message>
            <source>Batch: last {0} tokens, {1} per step, {2}/s.</source>
            <translation>Lotes: últimos {0} tokens, {1} por paso, {2}/s.</translation>
        </message>
        <message>
            <source>The last token took {0} ms.</source>
            <translation>El último token tardó {0} ms.</translation>
        </message>
        <message numerus="yes">
            <source>Last {0} tokens, {1}/s.</source>
            <translation>
                <numerusform>Último {0} token, {1}/s.</numerusform>
                <numerusform>Últimos {0} tokens, {1}/s.</numerusform>
            </translation>
        </message>
        <message>
            <source>Close or pause them first; further advice needs an idle machine.</source>
            <translation>Ciérrelos o páuselos primero; para más consejos, la máquina debe estar en reposo.</translation>
        </message>
        <message>
            <source>{0} CPU threads would be about {1} times as fast (predicted).</source>
            <translation>{0} hilos de CPU serían unas {1} veces más rápidos (previsto).</translation>
        </message>
        <message>
            <source>With {0} experts kept in VRAM it would be about {1} times as fast (predicted).</source>
            <translation>Con {0} expertos en la VRAM sería unas {1} veces más rápido (previsto).</translation>
        </message>
        <message>
            <source>With {0} experts kept in RAM it would be about {1} times as fast (predicted).</source>
            <translation>Con {0} expertos en la RAM sería unas {1} veces más rápido (previsto).</translation>
        </message>
        <message>
            <source>{0} weights would be about {1} times as fast (predicted).</source>
            <translation>Unos pesos en {0} serían unas {1} veces más rápidos (previsto).</translation>
        </message>
        <message>
            <source>No single change is predicted to gain over 5%.</source>
            <translation>Ningún cambio por sí solo promete más de un 5 %.</translation>
        </message>
    </context>
    <context>
        <name>SystemPromptPopover</name>
        <message>
            <source>System prompt</source>
            <translation>Prompt del sistema</translation>
        </message>
        <message>
            <source>Instructions the model reads first, such as who it is and how to answer.</source>
            <translation>Instrucciones que el modelo lee primero, como quién es y cómo debe responder.</translation>
        </message>
        <message>
            <source>You are a helpful assistant that answers in one sentence.</source>
            <translation>Eres un asistente servicial que responde en una frase.</translation>
        </message>
    </context>
    <context>
        <name>TelemetryHub</name>
        <message>
            <source>{0} loaded</source>
            <translation>{0} cargado</translation>
        </message>
        <message>
            <source>The engine ended unexpectedly</source>
            <translation>El motor terminó inesperadamente</translation>
        </message>
        <message>
            <source>The engine ended</source>
            <translation>El motor terminó</translation>
        </message>
        <message>
            <source>The engine's clock jumped</source>
            <translation>El reloj del motor dio un salto</translation>
        </message>
        <message>
            <source>The session is no longer recorded: its file could not be written ({0}).</source>
            <translation>La sesión ya no se graba: no se pudo escribir su archivo ({0}).</translation>
        </message>
    </context>
    <context>
        <name>TemplateCard</name>
        <message>
            <source>Prompt for each row</source>
            <translation>Prompt para cada fila</translation>
        </message>
        <message>
            <source>Template</source>
            <translation>Plantilla</translation>
        </message>
        <message>
            <source>Click a column to insert it at the cursor; it stands for each row's own text.</source>
            <translation>Haga clic en una columna para insertarla en el cursor; representa el texto de cada fila.</translation>
        </message>
        <message>
            <source>Column of pictures</source>
            <translation>Columna de imágenes</translation>
        </message>
        <message>
            <source>Its cells are paths of pictures, which begin in the file's folder, for a model that sees</source>
            <translation>Sus celdas son rutas de imágenes, desde la carpeta del archivo, para un modelo que ve imágenes</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>Prompt del sistema</translation>
        </message>
        <message>
            <source>System prompt: instructions for every row (optional)</source>
            <translation>Prompt del sistema: instrucciones para cada fila (opcional)</translation>
        </message>
        <message>
            <source>Pictures: none</source>
            <translation>Imágenes: ninguna</translation>
        </message>
        <message>
            <source>Pictures: {0}</source>
            <translation>Imágenes: {0}</translation>
        </message>
        <message>
            <source>Insert column {0}</source>
            <translation>Insertar la columna {0}</translation>
        </message>
        <message>
            <source>Summarise in one line: {0}</source>
            <translation>Resume en una línea: {0}</translation>
        </message>
        <message>
            <source>Describe the picture.</source>
            <translation>Describe la imagen.</translation>
        </message>
        <message>
            <source>{0} reads text only, so rows with pictures get no answer: choose a model that sees.</source>
            <translation>{0} solo lee texto, por lo que las filas con imágenes no obtienen respuesta: elija un modelo que vea imágenes.</translation>
        </message>
        <message>
            <source>Write a prompt that includes a column.</source>
            <translation>Escriba un prompt que incluya una columna.</translation>
        </message>
    </context>
    <context>
        <name>Thought</name>
        <message>
            <source>Copy what it thought</source>
            <translation>Copiar lo que pensó</translation>
        </message>
        <message>
            <source>Thinking</source>
            <translation>Razonamiento</translation>
        </message>
        <message>
            <source>Fold what the model thought</source>
            <translation>Plegar lo que pensó el modelo</translation>
        </message>
        <message>
            <source>Show what the model thought</source>
            <translation>Mostrar lo que pensó el modelo</translation>
        </message>
        <message>
            <source>unfolded</source>
            <translation>desplegado</translation>
        </message>
        <message>
            <source>folded</source>
            <translation>plegado</translation>
        </message>
        <message>
            <source>What the model thought</source>
            <translation>Lo que pensó el modelo</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Copiado</translation>
        </message>
    </context>
    <context>
        <name>TierRow</name>
        <message>
            <source>Hit rate of the last three minutes of decoding, 0 to 100%</source>
            <translation>Tasa de aciertos de los últimos tres minutos de decodificación, 0 a 100 %</translation>
        </message>
        <message>
            <source>{0} hits</source>
            <translation>{0} de aciertos</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>{0}% overall</source>
            <translation>{0} % en total</translation>
        </message>
        <message>
            <source>{0} of {1} experts</source>
            <translation>{0} de {1} expertos</translation>
        </message>
        <message>
            <source>Since the model was loaded: {0} of {1} lookups</source>
            <translation>Desde que se cargó el modelo: {0} de {1} accesos</translation>
        </message>
    </context>
    <context>
        <name>Timeline</name>
        <message>
            <source>Lane</source>
            <translation>Pista</translation>
        </message>
        <message>
            <source>Last</source>
            <translation>Último</translation>
        </message>
        <message>
            <source>Average</source>
            <translation>Media</translation>
        </message>
        <message>
            <source>Max</source>
            <translation>Máx.</translation>
        </message>
        <message>
            <source>{0}, out</source>
            <translation>{0}, salida</translation>
        </message>
        <message>
            <source>{0}, whole machine</source>
            <translation>{0}, toda la máquina</translation>
        </message>
        <message>
            <source>Token of step {0}: {1}</source>
            <translation>Token del paso {0}: {1}</translation>
        </message>
        <message>
            <source>{0} tokens at {1}/s</source>
            <translation>{0} tokens a {1}/s</translation>
        </message>
        <message>
            <source>{0} hits per token</source>
            <translation>{0} aciertos por token</translation>
        </message>
        <message>
            <source>{0} fetched</source>
            <translation>{0} traídos</translation>
        </message>
        <message>
            <source>{0} on the CPU</source>
            <translation>{0} en la CPU</translation>
        </message>
        <message>
            <source>layer {0}</source>
            <translation>capa {0}</translation>
        </message>
        <message>
            <source>expert {0}</source>
            <translation>experto {0}</translation>
        </message>
        <message>
            <source>{0} {1} tokens</source>
            <translation>{0} {1} tokens</translation>
        </message>
        <message>
            <source>This comes from a sensor or driver, not from the engine.</source>
            <translation>Esto viene de un sensor o controlador, no del motor.</translation>
        </message>
        <message>
            <source>sampling and bookkeeping</source>
            <translation>muestreo y gestión</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>expertos</translation>
        </message>
        <message>
            <source>attention</source>
            <translation>atención</translation>
        </message>
        <message>
            <source>hit</source>
            <translation>acierto</translation>
        </message>
        <message>
            <source>fetched</source>
            <translation>traído</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>writing</source>
            <translation>escribiendo</translation>
        </message>
        <message>
            <source>reading</source>
            <translation>leyendo</translation>
        </message>
        <message>
            <source>waiting</source>
            <translation>en espera</translation>
        </message>
        <message>
            <source>in the background</source>
            <translation>en segundo plano</translation>
        </message>
        <message>
            <source>written</source>
            <translation>escritos</translation>
        </message>
        <message>
            <source>read</source>
            <translation>leídos</translation>
        </message>
        <message>
            <source>of jobs</source>
            <translation>de tareas</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} de {1}</translation>
        </message>
        <message>
            <source>Move through time</source>
            <translation>Moverse por el tiempo</translation>
        </message>
        <message>
            <source>Move by almost a full view</source>
            <translation>Moverse casi una vista completa</translation>
        </message>
        <message>
            <source>Zoom in, zoom out</source>
            <translation>Acercar, alejar</translation>
        </message>
        <message>
            <source>Space</source>
            <translation>Espacio</translation>
        </message>
        <message>
            <source>Freeze the view, or follow live</source>
            <translation>Congelar la vista o seguir en directo</translation>
        </message>
        <message>
            <source>Home</source>
            <translation>Inicio</translation>
        </message>
        <message>
            <source>Go back to now</source>
            <translation>Volver a ahora</translation>
        </message>
        <message>
            <source>Move the crosshair; with Shift, farther</source>
            <translation>Mover la retícula; con Mayús, más lejos</translation>
        </message>
        <message>
            <source>Select the previous or next token</source>
            <translation>Seleccionar el token anterior o siguiente</translation>
        </message>
        <message>
            <source>Select a range</source>
            <translation>Seleccionar un intervalo</translation>
        </message>
        <message>
            <source>Enter</source>
            <translation>Intro</translation>
        </message>
        <message>
            <source>Zoom to the selected token or range</source>
            <translation>Ampliar al token o intervalo seleccionado</translation>
        </message>
        <message>
            <source>Esc</source>
            <translation>Esc</translation>
        </message>
        <message>
            <source>Clear the selection</source>
            <translation>Borrar la selección</translation>
        </message>
        <message>
            <source>waiting for {0}</source>
            <translation>esperando a {0}</translation>
        </message>
        <message>
            <source>written at {0} ×{1}</source>
            <translation>escrito en {0} ×{1}</translation>
        </message>
        <message>
            <source>ceiling {0} GB/s</source>
            <translation>tope {0} GB/s</translation>
        </message>
        <message>
            <source>token ticks</source>
            <translation>marcas de tokens</translation>
        </message>
    </context>
    <context>
        <name>TimelineCard</name>
        <message>
            <source>Hover to read every lane, drag to average, wheel or ↑ ↓ to zoom, ← → to move.</source>
            <translation>Apunte para leer cada pista, arrastre para promediar, rueda o ↑ ↓ para ampliar, ← → para moverse.</translation>
        </message>
        <message>
            <source>Machine</source>
            <translation>Máquina</translation>
        </message>
        <message>
            <source>Lanes of the machine's own sensors, below the engine's</source>
            <translation>Pistas de los sensores de la máquina, bajo las del motor</translation>
        </message>
        <message>
            <source>Show the machine's sensors</source>
            <translation>Mostrar los sensores de la máquina</translation>
        </message>
        <message>
            <source>Timeline as a table</source>
            <translation>Cronología como tabla</translation>
        </message>
        <message>
            <source>Table</source>
            <translation>Tabla</translation>
        </message>
        <message>
            <source>The same lanes as numbers</source>
            <translation>Las mismas pistas en cifras</translation>
        </message>
        <message>
            <source>Show the lanes as a table</source>
            <translation>Mostrar las pistas como tabla</translation>
        </message>
    </context>
    <context>
        <name>TimelineStrip</name>
        <message>
            <source>Machine activity</source>
            <translation>Actividad de la máquina</translation>
        </message>
        <message>
            <source>The last 20 seconds. Click for the Monitor.</source>
            <translation>Los últimos 20 segundos. Haga clic para abrir el Monitor.</translation>
        </message>
    </context>
    <context>
        <name>TimelineView</name>
        <message>
            <source>Timeline</source>
            <translation>Cronología</translation>
        </message>
        <message>
            <source>Arrow keys move and zoom, Space freezes, Home returns to now, comma and full stop move the crosshair, square brackets step through tokens, Enter zooms to a token. The table has the same data as text.</source>
            <translation>Las flechas mueven y amplían, Espacio congela, Inicio vuelve a ahora, coma y punto mueven la retícula, los corchetes van de token en token, Intro amplía un token. La tabla tiene los mismos datos como texto.</translation>
        </message>
        <message>
            <source>now</source>
            <translation>ahora</translation>
        </message>
    </context>
    <context>
        <name>TitleBar</name>
        <message>
            <source>Model: {0}</source>
            <translation>Modelo: {0}</translation>
        </message>
        <message>
            <source>Cancel loading</source>
            <translation>Cancelar la carga</translation>
        </message>
        <message>
            <source>Start a new chat</source>
            <translation>Empezar un chat nuevo</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>Chat nuevo</translation>
        </message>
        <message>
            <source>Ctrl N</source>
            <translation>Ctrl N</translation>
        </message>
        <message>
            <source>Chats  Ctrl+K</source>
            <translation>Chats  Ctrl+K</translation>
        </message>
        <message>
            <source>List of chats</source>
            <translation>Lista de chats</translation>
        </message>
        <message>
            <source>Double-click or press F2 to rename</source>
            <translation>Haga doble clic o pulse F2 para renombrar</translation>
        </message>
        <message>
            <source>engine stopped</source>
            <translation>motor detenido</translation>
        </message>
        <message>
            <source>engine not responding</source>
            <translation>el motor no responde</translation>
        </message>
        <message>
            <source>loading {0}</source>
            <translation>cargando {0}</translation>
        </message>
        <message>
            <source>starting the engine</source>
            <translation>iniciando el motor</translation>
        </message>
        <message>
            <source>no model loaded</source>
            <translation>ningún modelo cargado</translation>
        </message>
        <message>
            <source>tuned</source>
            <translation>optimizado</translation>
        </message>
        <message>
            <source>server not in the list</source>
            <translation>servidor fuera de la lista</translation>
        </message>
        <message>
            <source>its only model</source>
            <translation>su único modelo</translation>
        </message>
        <message>
            <source>{0} · sent to {1}</source>
            <translation>{0} · enviado a {1}</translation>
        </message>
        <message>
            <source>the model</source>
            <translation>el modelo</translation>
        </message>
        <message>
            <source>{0} experts per layer, {1} per token</source>
            <translation>{0} expertos por capa, {1} por token</translation>
        </message>
        <message>
            <source>Speed: of the last answer</source>
            <translation>Velocidad: de la última respuesta</translation>
        </message>
    </context>
    <context>
        <name>TokenCard</name>
        <message>
            <source>Per token</source>
            <translation>Por token</translation>
        </message>
        <message>
            <source>What one token, a word or a part of one, costs on average. Of the experts that it used, a hit was already in the graphics card’s memory; a miss was fetched or computed on the processor.</source>
            <translation>Lo que cuesta de media un token, una palabra o parte de ella. De los expertos usados, un acierto ya estaba en la memoria de la tarjeta gráfica; un fallo se trajo o se calculó en el procesador.</translation>
        </message>
        <message>
            <source>Experts used</source>
            <translation>Expertos usados</translation>
        </message>
        <message>
            <source>in VRAM (hit)</source>
            <translation>en VRAM (acierto)</translation>
        </message>
        <message>
            <source>fetched (miss)</source>
            <translation>traído (fallo)</translation>
        </message>
        <message>
            <source>on the CPU</source>
            <translation>en la CPU</translation>
        </message>
        <message>
            <source>Time</source>
            <translation>Hora</translation>
        </message>
        <message>
            <source>To the GPU</source>
            <translation>A la GPU</translation>
        </message>
        <message>
            <source>From disk</source>
            <translation>Del disco</translation>
        </message>
        <message>
            <source>Energy</source>
            <translation>Energía</translation>
        </message>
        <message>
            <source>{0} ms</source>
            <translation>{0} ms</translation>
        </message>
        <message>
            <source>{0} J</source>
            <translation>{0} J</translation>
        </message>
        <message>
            <source>not available here</source>
            <translation>no disponible aquí</translation>
        </message>
        <message>
            <source>Neither a graphics card nor the processor reports its power here (NVML, RAPL).</source>
            <translation>Ni una tarjeta gráfica ni el procesador indican aquí su consumo (NVML, RAPL).</translation>
        </message>
        <message>
            <source>Power as graphics cards and processors report it, over the tokens' time; now {0} W.</source>
            <translation>Consumo según las tarjetas gráficas y procesadores, durante el tiempo de los tokens; ahora {0} W.</translation>
        </message>
        <message>
            <source>Mean of the last {0} tokens</source>
            <translation>Media de los últimos {0} tokens</translation>
        </message>
        <message>
            <source>Mean of the last {0} batch tokens, {1} per step</source>
            <translation>Media de los últimos {0} tokens de lotes, {1} por paso</translation>
        </message>
    </context>
    <context>
        <name>TokenDialog</name>
        <message>
            <source>Save and download</source>
            <translation>Guardar y descargar</translation>
        </message>
        <message>
            <source>Access to {0}</source>
            <translation>Acceso a {0}</translation>
        </message>
        <message>
            <source>1. Open the page of {0}, sign in, and accept what is asked there.</source>
            <translation>1. Abra la página de {0}, inicie sesión y acepte lo que allí se pide.</translation>
        </message>
        <message>
            <source>Open {0}</source>
            <translation>Abrir {0}</translation>
        </message>
        <message>
            <source>2. Create an access token (reading is enough) in your settings there, and paste it here.</source>
            <translation>2. Cree allí, en su configuración, un token de acceso (basta con lectura) y péguelo aquí.</translation>
        </message>
        <message>
            <source>Access token</source>
            <translation>Token de acceso</translation>
        </message>
        <message>
            <source>Its makers ask you to accept their terms first</source>
            <translation>Sus autores piden aceptar antes sus condiciones</translation>
        </message>
        <message>
            <source>It is kept in the system's keyring, or for this run only where there is none, and sent to {0} alone.</source>
            <translation>Se guarda en el llavero del sistema o, si no lo hay, solo durante esta ejecución, y se envía únicamente a {0}.</translation>
        </message>
    </context>
    <context>
        <name>TokenRows</name>
        <message>
            <source>Remove token</source>
            <translation>Quitar token</translation>
        </message>
        <message>
            <source>Remove the token for {0}</source>
            <translation>Quitar el token de {0}</translation>
        </message>
    </context>
    <context>
        <name>ToolServerDialog</name>
        <message>
            <source>Save</source>
            <translation>Guardar</translation>
        </message>
        <message>
            <source>Test</source>
            <translation>Probar</translation>
        </message>
        <message>
            <source>Add a server with tools</source>
            <translation>Añadir un servidor de herramientas</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>Nombre</translation>
        </message>
        <message>
            <source>for example files</source>
            <translation>por ejemplo, archivos</translation>
        </message>
        <message>
            <source>Command</source>
            <translation>Comando</translation>
        </message>
        <message>
            <source>or address</source>
            <translation>o dirección</translation>
        </message>
        <message>
            <source>Variables or headers</source>
            <translation>Variables o cabeceras</translation>
        </message>
        <message>
            <source>NAME=value, one on each line</source>
            <translation>NOMBRE=valor, uno por línea</translation>
        </message>
        <message>
            <source>Values are kept in the system's keyring, or for this run only where there is none. ${NAME} in a value is read from the environment.</source>
            <translation>Los valores se guardan en el llavero del sistema o, si no lo hay, solo durante esta ejecución. ${NAME} en un valor se lee del entorno.</translation>
        </message>
        <message>
            <source>or JSON</source>
            <translation>o JSON</translation>
        </message>
        <message>
            <source>The command has a quote that does not end: correct it.</source>
            <translation>El comando tiene una comilla sin cerrar: corríjalo.</translation>
        </message>
        <message>
            <source>Each variable or header is NAME=value, on a line of its own.</source>
            <translation>Cada variable o cabecera es NOMBRE=valor, en su propia línea.</translation>
        </message>
        <message>
            <source>Enter the variables or headers again: they are kept for the old command or address alone.</source>
            <translation>Introduzca de nuevo las variables o cabeceras: solo se guardan para el comando o la dirección anteriores.</translation>
        </message>
        <message>
            <source>There is a server named {0}: choose another name.</source>
            <translation>Ya hay un servidor llamado {0}: elija otro nombre.</translation>
        </message>
        <message>
            <source>Starting…</source>
            <translation>Iniciando…</translation>
        </message>
    </context>
    <context>
        <name>Tools</name>
        <message numerus="yes">
            <source>It answers: {0} tools.</source>
            <translation>
                <numerusform>Responde: {0} herramienta.</numerusform>
                <numerusform>Responde: {0} herramientas.</numerusform>
            </translation>
        </message>
        <message>
            <source>not allowed</source>
            <translation>no permitido</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>falló</translation>
        </message>
        <message>
            <source>done in {0}</source>
            <translation>hecho en {0}</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>detenido</translation>
        </message>
        <message>
            <source>running…</source>
            <translation>en curso…</translation>
        </message>
        <message>
            <source>waits for you</source>
            <translation>espera su respuesta</translation>
        </message>
    </context>
    <context>
        <name>ToolsCard</name>
        <message>
            <source>Tools</source>
            <translation>Herramientas</translation>
        </message>
        <message>
            <source>Calculator</source>
            <translation>Calculadora</translation>
        </message>
        <message>
            <source>Computes what models get wrong. Runs without asking.</source>
            <translation>Calcula lo que los modelos hacen mal. Se ejecuta sin preguntar.</translation>
        </message>
        <message>
            <source>Clock</source>
            <translation>Reloj</translation>
        </message>
        <message>
            <source>Tells the date and the time. Runs without asking.</source>
            <translation>Indica la fecha y la hora. Se ejecuta sin preguntar.</translation>
        </message>
        <message>
            <source>Read a file</source>
            <translation>Leer un archivo</translation>
        </message>
        <message>
            <source>Of folders that are attached to the chat.</source>
            <translation>De las carpetas adjuntas al chat.</translation>
        </message>
        <message>
            <source>Run a batch</source>
            <translation>Ejecutar un lote</translation>
        </message>
        <message>
            <source>Starts a job that answers a prompt for each of many rows.</source>
            <translation>Inicia una tarea que responde un prompt para cada una de muchas filas.</translation>
        </message>
        <message>
            <source>Search documents</source>
            <translation>Buscar en documentos</translation>
        </message>
        <message>
            <source>Those that are attached to the chat. Runs without asking.</source>
            <translation>Los que están adjuntos al chat. Se ejecuta sin preguntar.</translation>
        </message>
        <message>
            <source>Offered to the model in chats where the switch at the message box is on. Before a tool runs you are asked, unless you allowed it.</source>
            <translation>Se ofrecen al modelo en los chats en que el interruptor del cuadro de mensaje está activado. Antes de que se ejecute una herramienta se le pregunta, salvo que ya la haya permitido.</translation>
        </message>
        <message>
            <source>Ask again for all</source>
            <translation>Volver a preguntar por todas</translation>
        </message>
        <message>
            <source>Always allowed</source>
            <translation>Siempre permitidas</translation>
        </message>
        <message>
            <source>Add…</source>
            <translation>Añadir…</translation>
        </message>
        <message>
            <source>Add a server with tools</source>
            <translation>Añadir un servidor de herramientas</translation>
        </message>
        <message>
            <source>Programs or addresses that bring tools by the Model Context Protocol, such as a web search. A program runs on this PC with your rights: add only what you trust.</source>
            <translation>Programas o direcciones que aportan herramientas mediante el Model Context Protocol, como una búsqueda web. Un programa se ejecuta en este PC con sus permisos: añada solo aquello en lo que confía.</translation>
        </message>
        <message>
            <source>MCP servers</source>
            <translation>Servidores MCP</translation>
        </message>
        <message>
            <source>No tool yet.</source>
            <translation>Todavía ninguna herramienta.</translation>
        </message>
        <message>
            <source>Offer the tools of {0}</source>
            <translation>Ofrecer las herramientas de {0}</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>Editar…</translation>
        </message>
        <message>
            <source>Edit {0}</source>
            <translation>Editar {0}</translation>
        </message>
        <message>
            <source>Remove</source>
            <translation>Quitar</translation>
        </message>
        <message>
            <source>Remove {0}</source>
            <translation>Quitar {0}</translation>
        </message>
        <message>
            <source>Its variables or headers are known for this run only: this system has no keyring.</source>
            <translation>Sus variables o cabeceras valen solo durante esta ejecución: este sistema no tiene llavero.</translation>
        </message>
        <message>
            <source>Its tools are asked for when a chat needs them.</source>
            <translation>Sus herramientas se consultan cuando un chat las necesita.</translation>
        </message>
        <message>
            <source>It offers no tools; its prompts and resources are not used here.</source>
            <translation>No ofrece herramientas; sus prompts y recursos no se usan aquí.</translation>
        </message>
        <message numerus="yes">
            <source>{0} tools: {1}</source>
            <translation>
                <numerusform>{0} herramienta: {1}</numerusform>
                <numerusform>{0} herramientas: {1}</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>Transcript</name>
        <message>
            <source>Conversation</source>
            <translation>Conversación</translation>
        </message>
        <message>
            <source>Jump to the latest</source>
            <translation>Ir a lo más reciente</translation>
        </message>
    </context>
    <context>
        <name>Tray</name>
        <message>
            <source>Switchyard is still running</source>
            <translation>Switchyard sigue en marcha</translation>
        </message>
        <message>
            <source>Its window is hidden; the icon here opens it, asks a question, or quits.</source>
            <translation>Su ventana está oculta; este icono la abre, hace una pregunta o cierra el programa.</translation>
        </message>
        <message>
            <source>Quick question…</source>
            <translation>Pregunta rápida…</translation>
        </message>
        <message>
            <source>Open Switchyard</source>
            <translation>Abrir Switchyard</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>Salir</translation>
        </message>
    </context>
    <context>
        <name>Tune</name>
        <message>
            <source>measured on this machine</source>
            <translation>medido en esta máquina</translation>
        </message>
        <message>
            <source>reported by the driver or the system</source>
            <translation>indicado por el controlador o el sistema</translation>
        </message>
        <message>
            <source>assumed, from data sheets</source>
            <translation>supuesto, de fichas técnicas</translation>
        </message>
        <message>
            <source>about {0}</source>
            <translation>unos {0}</translation>
        </message>
        <message>
            <source>just measured</source>
            <translation>medido ahora mismo</translation>
        </message>
        <message>
            <source>The CPU computes everything.</source>
            <translation>La CPU lo calcula todo.</translation>
        </message>
        <message>
            <source>{0} is part of the processor</source>
            <translation>{0} es parte del procesador</translation>
        </message>
        <message>
            <source>No graphics card</source>
            <translation>Sin tarjeta gráfica</translation>
        </message>
        <message>
            <source>not used by the engine</source>
            <translation>no la usa el motor</translation>
        </message>
        <message>
            <source>reported by the engine</source>
            <translation>indicado por el motor</translation>
        </message>
        <message>
            <source>and {0} more: {1}</source>
            <translation>y {0} más: {1}</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>{0}, emulated in RAM</source>
            <translation>{0}, emulada en RAM</translation>
        </message>
        <message>
            <source>{0}, {1} free</source>
            <translation>{0}, {1} libres</translation>
        </message>
        <message>
            <source>driver {0}</source>
            <translation>controlador {0}</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 núcleo</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} núcleo</numerusform>
                <numerusform>{0} núcleos</numerusform>
            </translation>
        </message>
        <message>
            <source>best with 1 thread</source>
            <translation>mejor con 1 hilo</translation>
        </message>
        <message numerus="yes">
            <source>best with {0} threads</source>
            <translation>
                <numerusform>mejor con {0} hilo</numerusform>
                <numerusform>mejor con {0} hilos</numerusform>
            </translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>the container's limit</source>
            <translation>el límite del contenedor</translation>
        </message>
        <message>
            <source>the limit set for WSL</source>
            <translation>el límite fijado para WSL</translation>
        </message>
        <message>
            <source>pinnable: {0}</source>
            <translation>fijable: {0}</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>It does not respond.</source>
            <translation>No responde.</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Disco</translation>
        </message>
        <message>
            <source>{0} free</source>
            <translation>{0} libres</translation>
        </message>
        <message>
            <source>hard disk</source>
            <translation>disco duro</translation>
        </message>
        <message>
            <source>network share</source>
            <translation>recurso de red</translation>
        </message>
        <message>
            <source>in memory</source>
            <translation>en memoria</translation>
        </message>
        <message>
            <source>disk of the host</source>
            <translation>disco del anfitrión</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>disco</translation>
        </message>
        <message>
            <source>{0} up</source>
            <translation>{0} de subida</translation>
        </message>
        <message>
            <source>{0} down</source>
            <translation>{0} de bajada</translation>
        </message>
        <message>
            <source>reading RAM</source>
            <translation>leer RAM</translation>
        </message>
        <message>
            <source>Looking up the hardware</source>
            <translation>Examinando el hardware</translation>
        </message>
        <message>
            <source>Waiting for other programs, which use {0} of the CPU</source>
            <translation>Esperando a otros programas, que usan el {0} de la CPU</translation>
        </message>
        <message>
            <source>Measuring {0}</source>
            <translation>Midiendo: {0}</translation>
        </message>
        <message>
            <source>Measuring</source>
            <translation>Midiendo</translation>
        </message>
        <message>
            <source>Planning</source>
            <translation>Planificando</translation>
        </message>
        <message>
            <source>Loading: {0}</source>
            <translation>Cargando: {0}</translation>
        </message>
        <message>
            <source>Timing real tokens: {0}</source>
            <translation>Midiendo tokens reales: {0}</translation>
        </message>
        <message>
            <source>Loading {0} again</source>
            <translation>Cargando {0} de nuevo</translation>
        </message>
        <message>
            <source>Reading RAM</source>
            <translation>Lectura de RAM</translation>
        </message>
        <message>
            <source>CPU arithmetic</source>
            <translation>Cálculo de CPU</translation>
        </message>
        <message>
            <source>Experts on the CPU</source>
            <translation>Expertos en la CPU</translation>
        </message>
        <message>
            <source>GPU arithmetic</source>
            <translation>Cálculo de GPU</translation>
        </message>
        <message>
            <source>Reading VRAM</source>
            <translation>Lectura de VRAM</translation>
        </message>
        <message>
            <source>Experts on the GPU</source>
            <translation>Expertos en la GPU</translation>
        </message>
        <message>
            <source>RAM to the card</source>
            <translation>RAM a la tarjeta</translation>
        </message>
        <message>
            <source>Card to RAM</source>
            <translation>Tarjeta a la RAM</translation>
        </message>
        <message>
            <source>Reading the disk</source>
            <translation>Lectura del disco</translation>
        </message>
        <message>
            <source>Decoding</source>
            <translation>Decodificación</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>About {0} tokens/s</source>
            <translation>Unos {0} tokens/s</translation>
        </message>
        <message>
            <source>predicted, {0} to {1} on an idle machine; first token after about {2} s</source>
            <translation>previsto, {0} a {1} en una máquina en reposo; primer token a los {2} s aprox.</translation>
        </message>
        <message>
            <source>measured with real tokens on {0}</source>
            <translation>medido con tokens reales en {0}</translation>
        </message>
        <message>
            <source>{0}: use this figure. The prediction was {1}, {2}% too high: it adds up what memory and processor can do, and leaves out the engine's overhead.</source>
            <translation>{0}: use esta cifra. La previsión era {1}, un {2} % demasiado alta: suma lo que pueden hacer memoria y procesador, y deja fuera el coste del motor.</translation>
        </message>
        <message>
            <source>{0}: use this figure. The prediction was {1}, {2}% too low: it is based on memory and processor measured one at a time, and together they are faster.</source>
            <translation>{0}: use esta cifra. La previsión era {1}, un {2} % demasiado baja: se basa en memoria y procesador medidos por separado, y juntos son más rápidos.</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 hilo</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} hilo</numerusform>
                <numerusform>{0} hilos</numerusform>
            </translation>
        </message>
        <message>
            <source>all experts on the card</source>
            <translation>todos los expertos en la tarjeta</translation>
        </message>
        <message>
            <source>{0} expert slots</source>
            <translation>{0} huecos de expertos</translation>
        </message>
        <message>
            <source>about {0}% hits</source>
            <translation>aprox. {0} % de aciertos</translation>
        </message>
        <message>
            <source>Not enough disk space: {0} of experts need it, and {1} are free.</source>
            <translation>No hay bastante espacio en disco: {0} de expertos lo necesitan y hay {1} libres.</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>experts read on demand</source>
            <translation>expertos leídos según se necesitan</translation>
        </message>
        <message>
            <source>layers read for each token</source>
            <translation>capas leídas para cada token</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Modelo inicial</translation>
        </message>
    </context>
    <context>
        <name>TuneCards</name>
        <message>
            <source>Your machine</source>
            <translation>Su máquina</translation>
        </message>
        <message>
            <source>Wider links have more bandwidth; hollow ones are assumed.</source>
            <translation>Los enlaces más anchos tienen más ancho de banda; los huecos son supuestos.</translation>
        </message>
        <message>
            <source>Looking up the hardware…</source>
            <translation>Examinando el hardware…</translation>
        </message>
        <message>
            <source>Where to compute</source>
            <translation>Dónde calcular</translation>
        </message>
    </context>
    <context>
        <name>TunePage</name>
        <message>
            <source>Tune</source>
            <translation>Optimizar</translation>
        </message>
        <message>
            <source>What if…</source>
            <translation>¿Y si…</translation>
        </message>
        <message>
            <source>Copy report</source>
            <translation>Copiar informe</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>Cancel tuning</source>
            <translation>Cancelar la optimización</translation>
        </message>
        <message>
            <source>Your hardware has changed since the last tuning. {0} Tune again.</source>
            <translation>Su hardware ha cambiado desde la última optimización. {0} Optimice de nuevo.</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Modelo inicial</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Copiado</translation>
        </message>
    </context>
    <context>
        <name>UnsavedTextGuard</name>
        <message>
            <source>The latest messages are not saved.</source>
            <translation>Los últimos mensajes no están guardados.</translation>
        </message>
        <message>
            <source>If you close the window now, they are lost.</source>
            <translation>Si cierra la ventana ahora, se pierden.</translation>
        </message>
        <message>
            <source>Keep the window open</source>
            <translation>Mantener la ventana abierta</translation>
        </message>
        <message>
            <source>Close and lose them</source>
            <translation>Cerrar y perderlos</translation>
        </message>
    </context>
    <context>
        <name>Updates</name>
        <message>
            <source>The installation was stopped. Nothing has changed: try again.</source>
            <translation>La instalación se interrumpió. No ha cambiado nada: inténtelo de nuevo.</translation>
        </message>
    </context>
    <context>
        <name>UpdatesCard</name>
        <message>
            <source>Check now</source>
            <translation>Buscar ahora</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Descargar</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>Switchyard {0}</source>
            <translation>Switchyard {0}</translation>
        </message>
        <message>
            <source>Go back</source>
            <translation>Volver</translation>
        </message>
        <message>
            <source>Previous version</source>
            <translation>Versión anterior</translation>
        </message>
        <message>
            <source>the official one</source>
            <translation>el oficial</translation>
        </message>
        <message>
            <source>Where newer versions come from. Only versions signed by Switchyard's developers are installed.</source>
            <translation>De dónde vienen las versiones más recientes. Solo se instalan las firmadas por los desarrolladores de Switchyard.</translation>
        </message>
        <message>
            <source>Update server</source>
            <translation>Servidor de actualizaciones</translation>
        </message>
        <message>
            <source>{0} is kept. Going back takes effect at the next start.</source>
            <translation>{0} se conserva. Volver a ella tiene efecto en el próximo inicio.</translation>
        </message>
        <message>
            <source>There is none.</source>
            <translation>No hay ninguna.</translation>
        </message>
        <message>
            <source>{0} is available ({1}).</source>
            <translation>{0} está disponible ({1}).</translation>
        </message>
        <message>
            <source>Not checked yet.</source>
            <translation>Aún sin buscar.</translation>
        </message>
        <message>
            <source>Checking…</source>
            <translation>Comprobando…</translation>
        </message>
        <message>
            <source>This is the newest version.</source>
            <translation>Esta es la versión más reciente.</translation>
        </message>
        <message>
            <source>Downloading {0}…</source>
            <translation>Descargando {0}…</translation>
        </message>
        <message>
            <source>{0} will be installed when answers and jobs are done.</source>
            <translation>{0} se instalará cuando terminen las respuestas y tareas.</translation>
        </message>
        <message>
            <source>Installing and testing {0}…</source>
            <translation>Instalando y probando {0}…</translation>
        </message>
        <message>
            <source>Restart Switchyard to use the other version.</source>
            <translation>Reinicie Switchyard para usar la otra versión.</translation>
        </message>
        <message>
            <source>Nothing has changed.</source>
            <translation>No ha cambiado nada.</translation>
        </message>
    </context>
    <context>
        <name>UserMessage</name>
        <message>
            <source>Copy</source>
            <translation>Copiar</translation>
        </message>
        <message>
            <source>Edit the message</source>
            <translation>Editar el mensaje</translation>
        </message>
        <message>
            <source>Ask this of every row of a file</source>
            <translation>Preguntar esto a cada fila de un archivo</translation>
        </message>
        <message>
            <source>Delete this message</source>
            <translation>Eliminar este mensaje</translation>
        </message>
        <message>
            <source>You: {0}</source>
            <translation>Usted: {0}</translation>
        </message>
        <message>
            <source>Edit message</source>
            <translation>Editar mensaje</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Cancelar</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Guardar</translation>
        </message>
        <message>
            <source>Changes the message; the answers after it stay.</source>
            <translation>Cambia el mensaje; las respuestas posteriores permanecen.</translation>
        </message>
        <message>
            <source>Send as new version</source>
            <translation>Reenviar</translation>
        </message>
    </context>
    <context>
        <name>VersionSwitch</name>
        <message>
            <source>Earlier version</source>
            <translation>Versión anterior</translation>
        </message>
        <message>
            <source>Later version</source>
            <translation>Versión posterior</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} de {1}</translation>
        </message>
    </context>
    <context>
        <name>Versions</name>
        <message>
            <source>You started Switchyard {0}, and this window is {1}: close it, then start the other.</source>
            <translation>Ha iniciado Switchyard {0} y esta ventana es {1}: ciérrela y luego inicie la otra.</translation>
        </message>
    </context>
    <context>
        <name>WhatIfCard</name>
        <message>
            <source>What if this machine had…</source>
            <translation>Y si esta máquina tuviera…</translation>
        </message>
        <message>
            <source>A few letters, such as 4090</source>
            <translation>Unas letras, como 4090</translation>
        </message>
        <message>
            <source>Graphics card as it is</source>
            <translation>Tarjeta gráfica actual</translation>
        </message>
        <message>
            <source> GB of VRAM</source>
            <translation> GB de VRAM</translation>
        </message>
        <message>
            <source>VRAM as it is</source>
            <translation>VRAM actual</translation>
        </message>
        <message>
            <source> GB of RAM</source>
            <translation> GB de RAM</translation>
        </message>
        <message>
            <source>RAM as it is</source>
            <translation>RAM actual</translation>
        </message>
        <message>
            <source> GB/s to the card</source>
            <translation> GB/s a la tarjeta</translation>
        </message>
        <message>
            <source>Link as it is</source>
            <translation>Enlace actual</translation>
        </message>
        <message>
            <source> GB/s from disk</source>
            <translation> GB/s del disco</translation>
        </message>
        <message>
            <source>Disk as it is</source>
            <translation>Disco actual</translation>
        </message>
        <message>
            <source>Graphics card</source>
            <translation>Tarjeta gráfica</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Link to the card</source>
            <translation>Enlace con la tarjeta</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Disco</translation>
        </message>
        <message>
            <source>Reset</source>
            <translation>Restablecer</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Cerrar</translation>
        </message>
        <message>
            <source>Change something above to see its effect.</source>
            <translation>Cambie algo arriba para ver su efecto.</translation>
        </message>
        <message>
            <source>The link needs a graphics card: choose one first.</source>
            <translation>El enlace necesita una tarjeta gráfica: elija una primero.</translation>
        </message>
        <message>
            <source>Planning…</source>
            <translation>Planificando…</translation>
        </message>
        <message>
            <source>It would fit, at about {0} tokens/s</source>
            <translation>Cabría, a unos {0} tokens/s</translation>
        </message>
        <message>
            <source>About {1} tokens/s: as fast as now</source>
            <translation>Unos {1} tokens/s: tan rápido como ahora</translation>
        </message>
        <message>
            <source>{0} tokens/s now, measured → about {1} predicted, {2} times as fast</source>
            <translation>{0} tokens/s ahora, medidos → unos {1} previstos, {2} veces más rápido</translation>
        </message>
        <message>
            <source>About {0} → about {1} tokens/s, {2} times as fast</source>
            <translation>Unos {0} → unos {1} tokens/s, {2} veces más rápido</translation>
        </message>
    </context>
    <context>
        <name>WorkLine</name>
        <message>
            <source>Stop</source>
            <translation>Detener</translation>
        </message>
    </context>
    <context>
        <name>WorkerProcess</name>
        <message>
            <source>The engine sent an invalid message: {0}</source>
            <translation>El motor envió un mensaje no válido: {0}</translation>
        </message>
        <message>
            <source>The engine could not be started ({0}): reinstall Switchyard.</source>
            <translation>No se pudo iniciar el motor ({0}): reinstale Switchyard.</translation>
        </message>
    </context>
    <context>
        <name>_GpuRow</name>
        <message>
            <source>Busy</source>
            <translation>Carga</translation>
        </message>
        <message>
            <source>VRAM: ours; hatched: other programs</source>
            <translation>VRAM: la nuestra; rayado: otros programas</translation>
        </message>
        <message>
            <source>GPU {0}</source>
            <translation>GPU {0}</translation>
        </message>
        <message>
            <source>{0}% busy</source>
            <translation>ocupado al {0} %</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} de {1}</translation>
        </message>
        <message>
            <source>not responding</source>
            <translation>no responde</translation>
        </message>
        <message>
            <source>{0} GHz</source>
            <translation>{0} GHz</translation>
        </message>
        <message>
            <source>memory {0} GHz</source>
            <translation>memoria {0} GHz</translation>
        </message>
        <message>
            <source>{0} W</source>
            <translation>{0} W</translation>
        </message>
        <message>
            <source>{0} °C</source>
            <translation>{0} °C</translation>
        </message>
        <message>
            <source>PCIe {0} in, {1} out GB/s</source>
            <translation>PCIe {0} entrada, {1} salida GB/s</translation>
        </message>
        <message>
            <source>slowed by {0}</source>
            <translation>frenada por {0}</translation>
        </message>
    </context>
</TS>
